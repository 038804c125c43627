"""A small cache that makes each value once, however many threads ask for it at the same time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from dataserver.jobs.turns import Unwanted, UnwantedError, always_wanted

LOOK_S: Final = 0.05
"""Time between two looks at whether a caller still waits."""

Value = TypeVar("Value")


class _Entry(Generic[Value]):
    def __init__(self) -> None:
        self.made: Future[Value] = Future()
        self.callers: list[Unwanted] = []
        """Of all that wait; changed under the cache's lock."""

    def unwanted(self) -> bool:
        """Whether none of them does any more."""
        return all(caller() for caller in tuple(self.callers))


class OnceCache(Generic[Value]):
    """The values used most recently, by number; concurrent callers of one number wait for the first one's result."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry[Value]] = {}

    def get(self, key: int, compute: Callable[[Unwanted], Value], unwanted: Unwanted = always_wanted) -> Value:
        """The value of `key`; an error of `compute` reaches all that wait, and is not kept.

        Args:
            key: its number.
            compute: makes the value. It is told when none of the callers waits any more, not the first one alone.
            unwanted: whether this caller no longer waits.

        Raises:
            UnwantedError: this caller no longer waits.
        """
        while True:
            entry, first = self._join(key, unwanted)
            try:
                if first:
                    self._fulfil(key, entry, compute)
                return _awaited(entry.made, unwanted)
            except UnwantedError:
                if unwanted():
                    raise
                # given up when all others had left, just before this caller came
            finally:
                with self._lock:
                    entry.callers.remove(unwanted)

    def _join(self, key: int, unwanted: Unwanted) -> tuple[_Entry[Value], bool]:
        with self._lock:  # held for the dictionary alone, never while a value is computed
            entry = self._entries.pop(key, None)
            first = entry is None
            entry = entry or _Entry[Value]()
            entry.callers.append(unwanted)
            self._entries[key] = entry  # most recently used last
            if len(self._entries) > self._size:
                del self._entries[next(iter(self._entries))]  # whoever waits for it holds it still
        return entry, first

    def _fulfil(self, key: int, entry: _Entry[Value], compute: Callable[[Unwanted], Value]) -> None:
        try:
            entry.made.set_result(compute(entry.unwanted))
        except BaseException as error:
            with self._lock:
                if self._entries.get(key) is entry:  # it may have been evicted, and another caller's be there
                    del self._entries[key]
            entry.made.set_exception(error)


def _awaited(made: Future[Value], unwanted: Unwanted) -> Value:
    while True:
        try:
            return made.result(LOOK_S)
        except TimeoutError:
            if made.done():  # an error of the computation, or settled just now
                return made.result()
            if unwanted():
                raise UnwantedError from None
