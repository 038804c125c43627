"""All sinks of a run together."""

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from trainclient.run_times.report import RunReport
from trainclient.training.metrics import StepMetrics


class SinkLostError(RuntimeError):
    """A sink that only shows what stands in the metrics file can take no more."""


class Sink(Protocol):
    """Takes the metrics of every step, in the order of the steps."""

    def write(self, metrics: StepMetrics) -> None:
        """Take the metrics of a step."""

    def finish(self, report: RunReport) -> None:
        """Take where the time of the run went, after its last step."""

    def sync(self) -> None:
        """Put on storage what was taken: a checkpoint is about to hold these steps."""

    def close(self) -> None:
        """Take leave; nothing comes after this."""


class MetricsWriter:
    """Hands each step to all sinks. Only the first process of a run has any.

    One that is lost is named once, and training goes on without it; whatever else a sink raises ends the run.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        """Write to these, in this order."""
        self._sinks = list(sinks)

    def write(self, metrics: StepMetrics) -> None:
        """Give the metrics of one step to every sink."""
        self._each(lambda sink: sink.write(metrics))

    def finish(self, report: RunReport) -> None:
        """Write where the time of the run went."""
        self._each(lambda sink: sink.finish(report))

    def sync(self) -> None:
        """Put on storage what was written."""
        self._each(lambda sink: sink.sync())

    def close(self) -> None:
        """Close every sink that was opened."""
        self._each(lambda sink: sink.close())

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                action(sink)
            except SinkLostError as error:
                self._sinks.remove(sink)
                sys.stderr.write(f"{error}; training goes on without it\n")
