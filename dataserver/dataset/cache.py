"""A small thread-safe cache bounded by cost (bytes, or a count), least recently used out first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Holds values up to a total cost; a value that costs more than the whole budget is not kept."""

    def __init__(self, budget: int, cost: Callable[[Value], int]) -> None:
        self._budget = budget
        self._cost = cost
        self._used = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    @property
    def used(self) -> int:
        """Cost of all values that are held."""
        with self._lock:
            return self._used

    def get(self, key: Hashable, load: Callable[[], Value]) -> Value:
        """Return the value of `key`, loading it where it is not held.

        Loading happens outside of the lock: two threads may load the same value, and one of the two is kept.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = load()
        cost = self._cost(value)
        with self._lock:
            if key not in self._values and cost <= self._budget:
                self._values[key] = value
                self._used += cost
                while self._used > self._budget:
                    self._remove(next(iter(self._values)))
        return value

    def drop(self, key: Hashable) -> None:
        """Forget a value, if it is held. A load under way may still put one there that is as old."""
        with self._lock:
            if key in self._values:
                self._remove(key)

    def drop_where(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget the values of some keys."""
        with self._lock:
            for key in [key for key in self._values if unwanted(key)]:
                self._remove(key)

    def _remove(self, key: Hashable) -> None:  # with the lock held
        self._used -= self._cost(self._values.pop(key))
