"""Threads that wait for stores. They end when they are idle, and with the process, whatever is queued then."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, ParamSpec, TypeVar

from dataserver.tracing import carried

IDLE_S: Final = 1.0

Result = TypeVar("Result")
Given = ParamSpec("Given")


class IoThreads:
    """A pool that, unlike that of `concurrent.futures`, does not finish its queue before the process ends."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_idle = 0
        self._num_waiting = 0
        """Tasks that no thread has begun."""

    @property
    def num_waiting(self) -> int:
        """Tasks that no thread has begun."""
        return self._num_waiting

    def submit(self, function: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> "Future[Result]":
        """Call a function in one of the threads."""
        future: Future[Result] = Future()
        self._queue.put((future, carried(lambda: function(*given, **named))))
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting > self._num_idle and self._num_threads < self._most:
                self._num_threads += 1
                threading.Thread(target=self._run, name=self._name).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                self._num_idle += 1
            try:
                future, work = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    self._num_idle -= 1
                    if self._num_waiting > 0:
                        continue
                    self._num_threads -= 1
                    return
            with self._lock:
                self._num_idle -= 1
                self._num_waiting -= 1
            if not threading.main_thread().is_alive():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                found = work()
            except BaseException as error:  # it is raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(found)
            del future, work


class ThreadsOfStores:
    """Such a pool for each store, so that one that hangs takes no thread from the others."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._pools: dict[str, IoThreads] = {}

    def of(self, store: str) -> IoThreads:
        """The threads that wait for a store."""
        with self._lock:
            found = self._pools.get(store)
            if found is None:
                found = self._pools[store] = IoThreads(self._most, self._name)
            return found
