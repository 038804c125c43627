"""A cache that makes each value once, however many threads ask for it at the same time, and is bounded in bytes."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar
from weakref import WeakValueDictionary

from dataserver.dataset import EvictionCounts, Evictions
from dataserver.jobs.scheduler import IsCancelled, WorkCancelledError, never_cancelled

LOOK_S: Final = 0.05
"""Time between two looks at whether a caller still waits."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _InFlight(Generic[Value]):
    def __init__(self) -> None:
        self.made: Future[Value] = Future()
        self.callers: list[IsCancelled] = []
        """One for each caller that waits; changed under the cache's lock."""

    def cancelled(self) -> bool:
        """Whether none of them does any more."""
        return all(caller() for caller in tuple(self.callers))


class SingleFlightCache(Generic[Key, Value]):
    """Values by key. Concurrent callers of one key wait for the first one's result.

    The values used most recently are cached, up to a cost; the one used last always is. A value that somebody still
    holds is found even if it is not cached: it takes its memory anyway.
    """

    def __init__(self, budget: int, cost: Callable[[Value], int]) -> None:
        """Make an empty cache.

        Args:
            budget: what all cached values may cost together.
            cost: of one value, such as its bytes. Values must be such that weak references to them can be made.
        """
        self._budget, self._cost = budget, cost
        self._used = 0
        self._lock = threading.Lock()
        """Held for the dictionaries alone, never while a value is made or its cost is found."""
        self._in_flight: dict[Key, _InFlight[Value]] = {}
        self._alive: WeakValueDictionary[Key, Value] = WeakValueDictionary()
        self._entries: dict[Key, tuple[Value, int]] = {}
        """With the cost of each; the value used last is the last one."""
        self._evictions = Evictions()

    def get(self, key: Key, compute: Callable[[IsCancelled], Value], cancelled: IsCancelled = never_cancelled) -> Value:
        """The value of `key`; an error of `compute` reaches all that wait, and is not cached.

        Args:
            key: names the value.
            compute: makes it. It is told when none of the callers waits any more, not the first one alone.
            cancelled: whether this caller no longer waits.

        Raises:
            WorkCancelledError: this caller no longer waits.
        """
        while True:
            with self._lock:
                value, first = self._alive.get(key), key not in self._in_flight
                if value is None:
                    computing = self._in_flight.setdefault(key, _InFlight())
                    computing.callers.append(cancelled)
            if value is not None:
                return self._used_last(key, value)
            try:
                if first:
                    self._make(key, computing, compute)
                return _awaited(computing.made, cancelled)
            except WorkCancelledError:
                if cancelled():
                    raise
                # given up when all others had left, just before this caller came
            finally:
                with self._lock:
                    computing.callers.remove(cancelled)
                    if not computing.callers:
                        # An error's traceback has frames that know `computing`: together with the future that holds the
                        # error they would live, with all that they work on, until a garbage collection.
                        computing.made = Future()

    @property
    def used(self) -> int:
        """What all cached values cost."""
        with self._lock:
            return self._used

    @property
    def evictions(self) -> EvictionCounts:
        """How many values were dropped for want of room, and made again soon after."""
        with self._lock:
            return self._evictions.counts

    def find(self, key: Key) -> Value | None:
        """The value of `key`, used last from now on; None if there is none."""
        with self._lock:
            value = self._alive.get(key)
        return None if value is None else self._used_last(key, value)

    def values(self) -> list[Value]:
        """All that are cached, and all that somebody holds."""
        with self._lock:
            return list(self._alive.values())

    def put(self, key: Key, value: Value) -> None:
        """Cache a value as the one used last, at what it costs now, and drop those used longest ago for it."""
        cost = self._cost(value)
        with self._lock:
            self._remove(key)
            if key not in self._alive:  # one that somebody still holds costs nothing to have again
                self._evictions.made(key)
            self._alive[key], self._entries[key] = value, (value, cost)
            self._used += cost
            while self._used > self._budget and len(self._entries) > 1:
                oldest = next(iter(self._entries))
                self._remove(oldest)
                self._evictions.dropped(oldest)

    def drop(self, where: Callable[[Key], bool]) -> None:
        """Drop the values of some keys."""
        with self._lock:
            for key in [key for key in self._entries if where(key)]:
                self._remove(key)

    def _make(self, key: Key, computing: _InFlight[Value], compute: Callable[[IsCancelled], Value]) -> None:
        try:
            value = compute(computing.cancelled)
            self.put(key, value)  # before it counts as made: whoever comes in between finds it
        except BaseException as error:
            with self._lock:
                del self._in_flight[key]
            computing.made.set_exception(error)
            return
        with self._lock:
            del self._in_flight[key]
        computing.made.set_result(value)

    def _used_last(self, key: Key, value: Value) -> Value:
        with self._lock:
            found = self._entries.pop(key, None)
            if found is not None:
                self._entries[key] = found
        if found is None:
            self.put(key, value)
        return value

    def _remove(self, key: Key) -> None:
        if (found := self._entries.pop(key, None)) is not None:
            self._used -= found[1]


def _awaited(made: Future[Value], cancelled: IsCancelled) -> Value:
    try:
        while True:
            try:
                return made.result(LOOK_S)
            except TimeoutError:
                if made.done():  # an error of the computation, or settled just now
                    return made.result()
                if cancelled():
                    raise WorkCancelledError from None
    finally:
        del made  # the error's traceback has this frame, see `SingleFlightCache.get`
