"""Which process is which, on this machine and among all machines."""

import os
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_STATE, _THREADS, _STARTED = 0, 17, 19
"""Positions in /proc/PID/stat behind the name of the command."""


def identity(pid: int | None = None) -> str:
    """What tells a process, by default this one, from those of all machines; empty where the system does not say.

    It is four words: the boot of its machine, its namespace of process ids, when it was started, and its process id.
    """
    own = str(os.getpid() if pid is None else pid)
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / own / 'ns/pid').readlink()} {_stat(own)[_STARTED]} {own}"
    except (OSError, IndexError):
        return ""


def is_here(process: str) -> bool:
    """Whether a process of that identity would be seen from here: same boot, same namespace of process ids."""
    return len(process.split()) == 4 and process.split()[:2] == identity().split()[:2]


def has_ended(process: str) -> bool:
    """Whether it is certain that a process of that identity has ended. What cannot be seen from here is not certain."""
    _, _, started, number = process.split() if is_here(process) else ("", "", "", "")
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # of another user, who may hide it from us
        pass
    try:
        stat = _stat(number)
        # One that only waits for its parent to ask how it ended has one thread left; others may still be writing.
        return stat[_STARTED] != started or (stat[_STATE] in "ZX" and int(stat[_THREADS]) <= 1)
    except (OSError, IndexError, ValueError):
        return False


def _stat(number: str) -> list[str]:
    """The words of /proc/PID/stat behind the command's name, which may hold anything."""
    return (_PROC / number / "stat").read_text(errors="replace").rpartition(")")[2].split()
