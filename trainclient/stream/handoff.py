"""Where the receiving thread leaves microbatches for the caller: bounded in bytes, with a watch over stalls."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from trainclient.stream.errors import ClosedError
from trainclient.stream.microbatch import Microbatch

MAX_READY: Final = 16
"""Microbatches in the queue, however small they are: servers plan every step that any of a job's ranks is at, so a
backbone of small views must not run dozens of steps ahead of its encoder."""

LOOK_S: Final = 5.0
"""A receiver that waits looks that often by itself: a collection may close its reader in its own thread, between its
look and its wait."""


class Handoff:
    """A queue of received microbatches between two threads.

    The receiver asks for leave before it takes memory, and gets it when the queue is empty or the new microbatch fits
    the bounds as well: one microbatch always fits, however large. While the receiver waits for it, it is not
    the server that is slow, and the stall clock is stopped.

    To take what lies ready needs no lock: the caller comes back from a long computation, on a busy core with cold
    caches, and all that it runs here counts as waiting for data.
    """

    def __init__(self, limit_bytes: int, stall_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._ready: deque[Microbatch[Any]] = deque()
        self._put_bytes = 0
        """Bytes of all microbatches put so far; only the receiver counts them."""
        self._taken_bytes = 0
        """Bytes of all microbatches taken so far; only the caller counts them."""
        self._stalled_at: float | None = time.monotonic() + stall_s
        self._finished = False
        self._error: Exception | None = None
        self._closed = False
        self._told: Callable[[], object] | None = None
        self._awaited = -1
        """The receiver waits until so few microbatches are left; -1 while it does not."""

    def restart_clock(self) -> None:
        """Receiver: a new request was sent."""
        with self._changed:
            self._start_clock()

    def stop_clock(self) -> None:
        """Receiver: what comes next takes its own time, and has a limit of its own."""
        with self._changed:
            self._stalled_at = None

    def when_emptied(self, told: Callable[[], object] | None) -> None:
        """Receiver: what is told, in the caller's thread, when nothing is left for it; a server may wait for that."""
        self._told = told

    def admit(self, nbytes: int) -> None:
        """Receiver: wait until a microbatch of that size may be received.

        Raises:
            ClosedError: the caller closed the reader.
        """
        with self._changed:
            self._stalled_at = None
            if self._ready and not self._fits(nbytes):
                self._await_at_most(len(self._ready) // 2)
                while not self._closed and self._ready and not self._fits(nbytes):
                    self._await_fewer()
            self._check_open()
            self._start_clock()

    def await_caller(self) -> None:
        """Receiver: wait until the caller takes another one, or has none left; for want of that a stream has ended.

        Raises:
            ClosedError: the caller closed the reader.
        """
        with self._changed:
            self._stalled_at = None
            self._await_fewer()
            self._check_open()

    def put(self, microbatch: Microbatch[Any]) -> None:
        """Receiver: leave a microbatch for the caller."""
        with self._changed:
            if self._closed:
                return
            self._put_bytes += microbatch.nbytes
            self._ready.append(microbatch)
            self._stalled_at = time.monotonic() + self._stall_s
            self._changed.notify_all()

    def finish(self, error: Exception | None) -> None:
        """Receiver: nothing follows, because the job ended or because of an error."""
        with self._changed:
            self._finished = True
            self._error = error
            self._changed.notify_all()

    def take(self, on_stall: Callable[[], None]) -> Microbatch[Any] | None:
        """Caller: the next microbatch; None at the end of the job.

        Args:
            on_stall: called when nothing came for too long; it must make the receiver try elsewhere.

        Raises:
            Exception: what the receiver finished with, after all that it received before.
            ClosedError: the reader was closed meanwhile.
        """
        try:
            microbatch = self._ready.popleft()
        except IndexError:
            found = self._await_ready(on_stall)
            if found is None:
                return None
            microbatch = found
        self._taken_bytes += microbatch.nbytes
        # The receiver says what it awaits before it looks at the queue, so that one of the two sees the other.
        left = len(self._ready)
        if left <= self._awaited:
            with self._changed:
                self._changed.notify_all()
        if not left and (told := self._told) is not None:
            with self._changed:
                if self._stalled_at is not None:  # the server may have waited to be told
                    self._stalled_at = time.monotonic() + self._stall_s
            told()
        return microbatch

    def close(self) -> None:
        """Caller: nothing more is wanted; what is queued is dropped."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    @property
    def ready(self) -> bool:
        """Whether a microbatch can be taken without waiting."""
        return bool(self._ready)

    @property
    def ready_bytes(self) -> int:
        """Bytes received and not yet taken."""
        return self._put_bytes - self._taken_bytes if self._ready else 0

    def _await_ready(self, on_stall: Callable[[], None]) -> Microbatch[Any] | None:
        with self._changed:
            self._changed.notify_all()  # an interrupt may have kept the take before from saying that nothing is left
            while not self._ready:
                if self._closed:
                    raise ClosedError("the reader was closed; open another one to go on")
                if self._finished:
                    if self._error is not None:
                        raise self._error
                    return None
                left = None if self._stalled_at is None else self._stalled_at - time.monotonic()
                if left is not None and left <= 0:
                    # With the lock held, so it must not wait for the receiver. It fires again after another `stall_s`.
                    self._stalled_at = time.monotonic() + self._stall_s
                    on_stall()
                else:
                    self._changed.wait(left)
            return self._ready.popleft()

    def _start_clock(self) -> None:
        self._stalled_at = time.monotonic() + self._stall_s
        self._changed.notify_all()  # a caller that found the clock stopped waits without a limit

    def _await_at_most(self, count: int) -> None:
        """Wait until so few are left, or the reader is closed. The caller wakes no thread before: on a machine whose
        cores are busy it may lose its own to the one it wakes, and gets it back some milliseconds later."""
        self._awaited = count
        while not (self._closed or len(self._ready) <= count):
            self._changed.wait(LOOK_S)
        self._awaited = -1

    def _await_fewer(self) -> None:
        self._await_at_most(max(0, len(self._ready) - 1))  # the caller may take the last one at any moment

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader was closed")

    def _fits(self, nbytes: int) -> bool:
        return len(self._ready) < MAX_READY and self.ready_bytes + nbytes <= self._limit_bytes
