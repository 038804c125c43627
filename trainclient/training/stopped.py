"""Ends a process of this machine that is stopped, which no signal but SIGKILL does.

torchrun would find that out by itself, but only half a minute after it has asked the process to end.
"""

import contextlib
import os
import signal
from pathlib import Path

_PROC = Path("/proc")


def identity(pid: int | None = None) -> str:
    """What tells a process, by default this one, from those of all machines; empty where the system does not say."""
    own = _PROC / str(os.getpid() if pid is None else pid)
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        started = (own / "stat").read_text().rpartition(")")[2].split()[19]
        return f"{boot} {(own / 'ns/pid').readlink()} {started} {own.name}"
    except OSError:
        return ""


def end(process: str) -> None:
    """Kill a process of that identity; nothing happens unless it runs on this machine, where this one may do that."""
    _, _, number = process.rpartition(" ")
    if not number or number == str(os.getpid()):
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # gone; no number; a system without such handles
        handle = os.pidfd_open(int(number))
        try:
            if identity(int(number)) == process:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
