"""A fair scheduler of jobs: what computes for a job runs in slices of time, and the job that used least goes next.

A slice counts once for each core that its work asked for.

A piece of work lets another one compute at the yield points of planning. While one is in a long kernel, or
waits for storage, it reaches none; then others go on beside it, since what computes for so long holds no lock of the
interpreter.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

from dataserver.dataset import usable_cores
from dataserver.planning import computing_on, yielding_to

SLICE_S: Final = 0.02
"""Time that a job computes before another one does; the work of an ordinary step takes one or two slices."""
OVERDUE_S: Final = 0.02
"""After so long between two yield points, others go on beside a piece of work."""
PATIENCE_S: Final = 0.25
"""Time between two looks of work that waits: is it cancelled?"""

IsCancelled = Callable[[], bool]
"""Whether nobody waits for the result any more. Called often, from any thread."""
Value = TypeVar("Value")


class WorkCancelledError(Exception):
    """Work that was given up because nobody waits for its result."""


def never_cancelled() -> bool:
    """Return False, for callers that wait whatever happens."""
    return False


class _Work:
    """One piece of work; what changes is guarded by the scheduler's lock, but for `seen` and `cores`."""

    def __init__(self, job: str, cancelled: IsCancelled) -> None:
        self.job = job
        self.cancelled = cancelled
        self.granted = False
        self.woken = threading.Event()
        """Set when it may compute, or is the first that waits."""
        self.since = 0.0
        """When its slice of time began."""
        self.seen = 0.0
        """When it was last at a yield point."""
        self.cores = 1
        """The most that it was given in its slice of time."""


class FairScheduler:
    """Shares a server's planning time fairly among its jobs. Thread-safe."""

    def __init__(
        self, at_once: int | None = None, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Make a scheduler without work.

        Args:
            at_once: pieces of work that compute at once; by default one for every two cores. All that compute share
                these cores, half of what there are, so that decoding and sending have the others.
            waiting: entered whenever work is queued, and left when it computes.
        """
        self._cores = max(1, usable_cores() // 2)
        self._at_once = self._cores if at_once is None else at_once
        self._queued = waiting
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}
        """Seconds of computing by job, times cores, counted from where the job that used least stood when it came."""
        self._begun: dict[str, _Work] = {}
        """A job has one piece of work begun at most, so that what many of them hold in memory is bounded."""
        self._waiting: list[_Work] = []
        self._working: list[_Work] = []

    def run(self, job: str, work: Callable[[], Value], cancelled: IsCancelled = never_cancelled) -> Value:
        """Do a job's work in slices of time, between those of others.

        Raises:
            WorkCancelledError: `cancelled` came true before the work was done.
        """
        mine = _Work(job, cancelled)
        try:
            with self._lock:
                self._enter(mine)
            self._wait(mine)
            with yielding_to(lambda: self._yield_point(mine)), computing_on(lambda: self._cores_of(mine)):
                return work()
        finally:
            with self._lock:
                self._leave(mine)

    def _cores_of(self, mine: _Work) -> int:
        """For a piece of work that asks: an equal share of those for planning, with what others compute just now."""
        share = max(1, self._cores // max(1, len(self._working)))
        mine.cores = max(mine.cores, share)
        return share

    def _enter(self, mine: _Work) -> None:
        active = {w.job for w in (*self._waiting, *self._working)}
        if not active:
            self._used.clear()  # nobody waits, so nobody owes
        least = min((self._used[job] for job in active), default=0.0)
        # Who did nothing saves nothing up, and who is ahead of the others stays so, also in a new piece of work.
        self._used = {job: used for job, used in self._used.items() if job in active or used > least}
        self._used.setdefault(mine.job, least)
        self._waiting.append(mine)
        self._grant()

    def _leave(self, mine: _Work) -> None:
        if self._begun.get(mine.job) is mine:
            del self._begun[mine.job]
        self._stop(mine)
        if mine in self._waiting:
            self._waiting.remove(mine)
        self._grant()

    def _stop(self, mine: _Work) -> None:
        if mine in self._working:
            self._working.remove(mine)
            self._used[mine.job] += (time.monotonic() - mine.since) * mine.cores

    def _grant(self) -> None:
        """Let the jobs compute that used least; of one job, the work that came first."""
        now = time.monotonic()
        taken = sum(now - w.seen < OVERDUE_S for w in self._working)
        ready = [w for w in self._waiting if self._begun.get(w.job, w) is w]
        while taken < self._at_once and ready:
            chosen = min(ready, key=lambda w: self._used[w.job])
            ready = [w for w in ready if w.job != chosen.job]
            self._begun[chosen.job] = chosen
            self._waiting.remove(chosen)
            self._working.append(chosen)
            chosen.since = chosen.seen = now
            chosen.cores = 1
            chosen.granted = True
            chosen.woken.set()
            taken += 1
        if self._waiting:
            self._waiting[0].woken.set()

    def _wait(self, mine: _Work) -> None:
        if not mine.granted:
            with self._queued():
                self._wait_long(mine)

    def _wait_long(self, mine: _Work) -> None:
        while True:
            with self._lock:
                # What is overdue says nothing by itself; of all that wait, only the first one looks for it.
                first = self._waiting[:1] == [mine]
                if first:
                    self._grant()
                if mine.granted:
                    return
                patience = min(PATIENCE_S, self._until_overdue()) if first else PATIENCE_S
                mine.woken.clear()
            mine.woken.wait(patience)
            if mine.cancelled():
                raise WorkCancelledError

    def _until_overdue(self) -> float:
        """Seconds until one more piece of work is overdue; infinity where all are that work."""
        now = time.monotonic()
        left = (w.seen + OVERDUE_S - now for w in self._working)
        return min((seconds for seconds in left if seconds > 0), default=float("inf"))

    def _yield_point(self, mine: _Work) -> None:
        if mine.cancelled():
            raise WorkCancelledError
        mine.seen = time.monotonic()
        if mine.seen - mine.since < SLICE_S:
            return
        with self._lock:
            self._stop(mine)
            mine.granted = False
            self._waiting.append(mine)
            self._grant()
        self._wait(mine)
