"""Ctrl-C, SIGTERM, and the loss of the launcher: finish the step in hand, but never linger."""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Self

LAUNCHER_PID = "DISTTRAIN_LAUNCHER_PID"
"""Environment variable that names the launcher's process; without it the parent is watched, which may have changed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Notes SIGINT, SIGTERM and the end of the parent process while it is entered; ends the process after a grace.

    A process that waits for another one in a collective runs no Python signal handler. The interpreter's wake-up
    descriptor is written in the C handler, so a thread that reads it learns of the signal in any case.
    """

    def __init__(self, grace_s: float) -> None:
        """Give the process `grace_s` seconds to leave the context after the first reason to stop."""
        self._grace_s = grace_s
        self._requested = threading.Event()
        self._left = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._stack = contextlib.ExitStack()

    @property
    def requested(self) -> bool:
        """Whether there was a reason to stop."""
        return self._requested.is_set()

    def __enter__(self) -> Self:
        # Before the handlers: a signal in between still has its default action instead of being lost.
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        for number in _SIGNALS:
            self._stack.callback(signal.signal, number, signal.signal(number, _note))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # First `_left`, so that the thread no longer ends the process. The C handler gives the descriptor up before it
        # is closed, and the thread ends when it is.
        self._left.set()
        self._stack.close()
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _watch(self) -> None:
        try:
            parent = _parent()
        except ProcessLookupError:
            self._stop(signal.SIGTERM)
            parent = []
        sources = [self._reader.fileno(), *parent]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if self._reader.fileno() not in ready:
                self._stop(signal.SIGTERM)
                sources.remove(parent[0])
            elif received := self._reader.recv(1):
                self._stop(received[0])
            else:
                break
        for descriptor in parent:
            os.close(descriptor)

    def _stop(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        # In the watching thread: the main one may be stuck in a collective, which no exception reaches.
        self._requested.set()
        if not self._left.wait(self._grace_s):
            sys.stderr.write(f"process {os.getpid()} did not finish its step in {self._grace_s:g} s: ended\n")
            sys.stderr.flush()
            os._exit(128 + number)


def _parent() -> list[int]:
    """A descriptor that becomes readable when the process that started this one ends, where the system has such.

    Raises:
        ProcessLookupError: it ended already.
    """
    try:
        return [os.pidfd_open(int(os.environ.get(LAUNCHER_PID, os.getppid())))]
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # other systems, old kernels, containers that forbid the call
        return []


def _note(number: int, frame: FrameType | None) -> None:
    """Replace the default action; the watching thread does the rest."""
    del number, frame
