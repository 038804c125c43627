"""Metrics of training as events that TensorBoard reads."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataserver.extras import pip_install
from trainclient.run_times.report import RunReport
from trainclient.training.config import ConfigError
from trainclient.training.metrics import StepMetrics
from trainclient.training.sinks.scalars import scalars
from trainclient.training.sinks.writer import SinkLostError

_VERSION = "brain.Event:2"


def require_tensorboard() -> None:
    """Raise ConfigError, with the command that installs it, unless TensorBoard is there."""
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard needs a package that is not installed ({error}); run {pip_install('tensorboard')}"
        ) from None


class TensorBoard:
    """Writes a point of a curve for every number of the metrics, an event for each step.

    TensorBoard's own writer does so in a thread, which ends with a traceback when the disk is full.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Write into a folder; what is there of this step and later ones is hidden, since it comes again.

        Raises:
            ConfigError: the package is not installed, or the folder cannot be written.
        """
        require_tensorboard()
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder, self._event, self._summary = folder, Event, Summary
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
            self._records = RecordWriter((folder / name).open("xb"))
            try:
                self._add(file_version=_VERSION)
                self._add(step=step, session_log=SessionLog(status=SessionLog.START))
                self._records.flush()
            except OSError:
                (folder / name).unlink()
                raise
        except OSError as error:
            raise ConfigError(f"the folder {folder} of --tensorboard cannot be written: {error.strerror}") from None

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step as scalars."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(metrics).items()]
        with self._explained():
            self._add(step=metrics.step, summary=self._summary(value=values))
            self._records.flush()

    def finish(self, report: RunReport) -> None:
        """Nothing: a report is no curve."""

    def sync(self) -> None:
        """Every step is written out when it is taken."""

    def close(self) -> None:
        """Close the file, and say what failed."""
        with self._explained():
            self._records.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SinkLostError(
                f"the folder {self._folder} of --tensorboard cannot be written: {error.strerror}"
            ) from None
