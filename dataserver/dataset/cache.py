"""A small thread-safe cache bounded by cost (bytes, or a count), least recently used out first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from dataserver.dataset.evictions import EvictionCounts, Evictions

Value = TypeVar("Value")


class _Loading(Generic[Value]):
    """A value that one thread loads."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.values: list[Value] = []
        """The value, if there is one when it has ended."""


class LruCache(Generic[Value]):
    """Holds values up to a total cost; a value that costs more than the whole budget is not kept."""

    def __init__(self, budget: int, cost: Callable[[Value], int]) -> None:
        self._budget = budget
        self._cost = cost
        self._used = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._loading: dict[Hashable, _Loading[Value]] = {}
        self._evictions = Evictions()

    @property
    def used(self) -> int:
        """Cost of all values that are held."""
        with self._lock:
            return self._used

    @property
    def evictions(self) -> EvictionCounts:
        """How many values were dropped for want of room, and made again soon after."""
        with self._lock:
            return self._evictions.counts

    def get(self, key: Hashable, load: Callable[[], Value]) -> Value:
        """Return the value of `key`, loading it where it is not held.

        Of several threads that want it at a time the first one loads, outside of the lock, and the others wait for it;
        where it fails they try themselves.
        """
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                loading, is_first = self._loading.get(key), key not in self._loading
                if loading is None:
                    loading = self._loading[key] = _Loading()
            if is_first:
                return self._load(key, load, loading)
            loading.ended.wait()
            if loading.values:
                return loading.values[0]

    def _load(self, key: Hashable, load: Callable[[], Value], loading: "_Loading[Value]") -> Value:
        try:
            value = load()
            cost = self._cost(value)
            loading.values.append(value)
        finally:
            with self._lock:
                if self._loading.get(key) is loading:
                    del self._loading[key]
                if loading.values and key not in self._values:
                    self._evictions.made(key)
                    self._take(key, value, cost)
            loading.ended.set()
        return value

    def drop(self, key: Hashable) -> None:
        """Forget a value, if it is held. A load under way may still put one there that is as old."""
        with self._lock:
            self._loading.pop(key, None)
            if key in self._values:
                self._remove(key)

    def drop_where(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget the values of some keys."""
        with self._lock:
            for key in [key for key in self._values if unwanted(key)]:
                self._remove(key)

    def _take(self, key: Hashable, value: Value, cost: int) -> None:  # with the lock held
        if cost > self._budget:
            self._evictions.dropped(key)
            return
        self._values[key] = value
        self._used += cost
        while self._used > self._budget:
            oldest = next(iter(self._values))
            self._remove(oldest)
            self._evictions.dropped(oldest)

    def _remove(self, key: Hashable) -> None:  # with the lock held
        self._used -= self._cost(self._values.pop(key))
