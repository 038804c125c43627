"""Ends a process of this machine that is stopped, which no signal but SIGKILL does.

torchrun would find that out by itself, but only half a minute after it has asked the process to end.
"""

import contextlib
import os
import signal

from trainclient.processes import identity


def kill_process(process: str) -> None:
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
