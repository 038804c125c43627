"""The metrics file: a JSON line for every step of one run, each once, and where the run ends one of its times.

A run that resumes repeats the steps after its checkpoint, so their lines are cut off first, with a last line that was
not written to its end. All lines name the run, and a file with any other line is left as it is.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dataserver.outputs import beside
from trainclient.run_times.report import RunReport
from trainclient.training.metrics import StepMetrics

_END = b"\n"
_TIMES = "run_times"
"""Field of a line that is of no step."""
_CHANGE = "give --metrics another file, or remove this one"


class MetricsError(ValueError):
    """A metrics file that is of something else, or cannot be read or written."""


class JsonLines:
    """Appends a line for every step."""

    def __init__(self, path: Path, run: str, step: int, *, copied: bool = False) -> None:
        """Go on with a file, or begin it.

        Args:
            path: the file; its folder is made.
            run: name of the run, which every line carries.
            step: the next one; lines of this one and later ones are cut off, all at once.
            copied: go on with a copy under the same name, so that whoever has the file open writes into it no more.

        Raises:
            MetricsError: the file is not one of this run, or cannot be written.
        """
        self._path = path
        self._run = run
        keep = bytes_before(path, run, step)
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if copied and path.exists():
                with beside(path.resolve()) as copy:
                    shutil.copyfile(path, copy)
            self._file = path.open("ab")
            self._file.truncate(keep)

    def write(self, metrics: StepMetrics) -> None:
        """Append the metrics of one step as a line."""
        self._append(asdict(metrics))

    def finish(self, report: RunReport) -> None:
        """Append where the time of the run went."""
        self._append({_TIMES: report.as_dict()})
        self.sync()

    def sync(self) -> None:
        """Put all lines on storage, so that no power cut can leave a checkpoint with steps that the file lacks."""
        with _explained(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, and say what failed."""
        with _explained(self._path):
            self._file.close()

    def _append(self, fields: dict[str, Any]) -> None:
        line = json.dumps({"run": self._run, **fields}).encode() + _END
        with _explained(self._path):
            self._file.write(line)
            self._file.flush()


def bytes_before(path: Path, run: str, step: int) -> int:
    """How many bytes of a metrics file hold steps before one; nothing is changed.

    Raises:
        MetricsError: a line that is not a step of this run, steps out of order, or the file cannot be read.
    """
    keep, last = 0, -1
    with _explained(path):
        if not path.exists():
            return 0
        if not (path.is_file() or path.is_dir()):  # to open a pipe may wait for ever
            raise MetricsError(
                f"the metrics file {path} is a pipe or a device; lines are read again when a run resumes: give "
                "--metrics a regular file"
            )
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(_END):  # its process was killed in the middle of it, or the disk was full
                    break
                found = _step(path, number, line, run)
                if found is not None and found <= last:
                    raise MetricsError(
                        f"line {number} of the metrics file {path} has step {found} after {last}; {_CHANGE}"
                    )
                last = last if found is None else found
                keep += len(line) if last < step else 0
    return keep


def _step(path: Path, number: int, line: bytes, run: str) -> int | None:
    """The step of a line, None for the times of a run; MetricsError if it is none of the run."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    step = found.get("step") if isinstance(found, dict) else None
    if not isinstance(step, int) and not (isinstance(found, dict) and _TIMES in found):
        raise MetricsError(f"line {number} of the metrics file {path} is not the metrics of a step; {_CHANGE}")
    if found.get("run") != run:
        raise MetricsError(
            f"the metrics file {path} is of another run: {found.get('run', 'none')} in line {number}, and this is "
            f"{run}; {_CHANGE}"
        )
    return step if isinstance(step, int) else None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the file that the system complains about."""
    try:
        yield
    except OSError as error:
        raise MetricsError(
            f"the metrics file {path} cannot be used: {error.strerror}; mend that, or give --metrics another file. "
            "Training goes on from its last checkpoint"
        ) from None
