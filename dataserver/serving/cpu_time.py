"""CPU time of a server: of its own process, and of those that it starts for new filters and for transforms of users."""

import os
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import process_time
from typing import Final

from dataserver.process import children_of

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_TIMES: Final = slice(11, 15)
"""Fields of /proc/PID/stat behind the name: user and system time of the process and of its ended children, in ticks."""
_TRIES: Final = 3


def cpu_seconds() -> float:
    """Seconds of CPU time that this process and all below it have used since they began.

    Linux counts those that have ended with this process once it has waited for them; what still runs is looked up.
    """
    for _ in range(_TRIES):
        ended = _ended_seconds()
        running = sum(map(_seconds, children_of(os.getpid())))
        if ended == _ended_seconds():  # else one may have been counted twice, or not at all
            break
    return process_time() + ended + running


def _ended_seconds() -> float:
    found = getrusage(RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def _seconds(pid: int) -> float:
    """CPU time of a process and of all below it; 0 where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    own = sum(map(int, stat.rpartition(")")[2].split()[_TIMES])) / _TICKS_PER_S
    return own + sum(map(_seconds, children_of(pid)))
