"""What the processes of a run took: computing and sleeping, whatever else the machine does."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "MUTATION_RUN"
"""Names a run in the environment of all its processes: some have sessions of their own, some outlive their parents."""
INTERVAL_S = 0.25
"""Time between two looks at the processes."""
_TICKS = os.sysconf("SC_CLK_TCK")
_GONE = ProcessLookupError, FileNotFoundError, PermissionError


@dataclass
class Effort:
    """What the processes with a mark have computed and slept. One that waits for a core does neither, so that a busy
    machine makes nothing take longer; a loop without end computes, and a deadlock sleeps."""

    mark: str
    computed_s: float = 0.0
    asleep_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of computing and sleeping together."""
        return self.computed_s + self.asleep_s

    def look(self) -> None:
        """Take notice of the processes as they are now; to be called about every `INTERVAL_S`."""
        found = list(marked(self.mark))
        self.computed_s = max(self.computed_s, sum(map(_computed_s, found)))
        if not any(map(_wants_a_core, found)):
            self.asleep_s += INTERVAL_S

    def end(self) -> None:
        """Kill the processes, and those that they start meanwhile."""
        while found := list(marked(self.mark)):
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)
            time.sleep(0.01)


def marked(mark: str) -> Iterator[Path]:
    """The folders in /proc of the processes with a mark; those that ended and were not waited for have none."""
    wanted = f"{MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(*_GONE):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                yield process


def _computed_s(process: Path) -> float:
    """Return the CPU time of the process and of its children that ended and were waited for."""
    return sum(map(int, _fields(process / "stat")[11:15])) / _TICKS


def _wants_a_core(process: Path) -> bool:
    """Whether one of its threads runs, would run if a core were free, or waits for a disk."""
    with suppress(*_GONE):
        return any(_fields(thread / "stat")[:1] in (["R"], ["D"]) for thread in (process / "task").iterdir())
    return False


def _fields(stat: Path) -> list[str]:
    """Those behind the name of the program, from the third in proc(5) on; none where it ended meanwhile."""
    with suppress(*_GONE):
        return stat.read_text().rpartition(")")[2].split()
    return []
