"""A small cache that makes each value once, however many threads ask for it at the same time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")


class OnceCache(Generic[Value]):
    """The values used most recently, by number; concurrent callers of one number wait for the first one's result."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Value]] = {}

    def get(self, key: int, compute: Callable[[], Value]) -> Value:
        """The value of `key`; an error of `compute` reaches all that wait, and is not kept."""
        with self._lock:  # held for the dictionary alone, never while a value is computed
            future = self._futures.pop(key, None)
            first = future is None
            future = future or Future[Value]()
            self._futures[key] = future  # most recently used last
            if len(self._futures) > self._size:
                del self._futures[next(iter(self._futures))]  # whoever waits for it holds it still
        if first:
            try:
                future.set_result(compute())
            except BaseException as error:
                with self._lock:
                    if self._futures.get(key) is future:  # it may have been evicted, and another caller's be there
                        del self._futures[key]
                future.set_exception(error)
        return future.result()
