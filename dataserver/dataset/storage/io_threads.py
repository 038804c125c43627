"""Threads that wait for stores. They end when they are idle, and with the process, whatever is queued then."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, ParamSpec, TypeVar

from dataserver.tracing import carried

IDLE_S: Final = 1.0

Result = TypeVar("Result")
Given = ParamSpec("Given")
_log = logging.getLogger(__name__)


class IoThreads:
    """A pool that, unlike that of `concurrent.futures`, does not finish its queue before the process ends."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        # No SimpleQueue: its `get` with a timeout was seen to wait without end (Python 3.11), where another thread
        # takes what woke it as the time runs out. The process then never ends.
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._num_threads = 0
        self._num_idle = 0
        self._is_short = False
        """Whether a thread could not be started, the last time that one was wanted."""

    @property
    def num_waiting(self) -> int:
        """Tasks that no thread has begun."""
        return len(self._tasks)

    def submit(self, function: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> "Future[Result]":
        """Call a function in one of the threads; where there is none and none can be started, the call is cancelled."""
        future: Future[Result] = Future()
        task = future, carried(lambda: function(*given, **named))
        with self._changed:
            self._tasks.append(task)
            if len(self._tasks) > self._num_idle and self._num_threads < self._most:
                self._start_thread()
            else:
                self._changed.notify()
            has_threads = self._num_threads > 0
            if not has_threads:
                self._tasks.pop()
        if not has_threads:
            future.cancel()  # without the lock: callbacks run here
        return future

    def _start_thread(self) -> None:
        """Start another thread, where the system gives one; the lock is held."""
        try:
            threading.Thread(target=self._run, name=self._name).start()
        except RuntimeError as error:
            if not self._is_short:
                _log.warning("no further thread can be started for %s: %s", self._name, error)
            self._is_short = True
        else:
            self._num_threads += 1
            self._is_short = False

    def _run(self) -> None:
        while (task := self._next()) is not None:
            future, work = task
            if not threading.main_thread().is_alive():
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    found = work()
                except BaseException as error:  # it is raised where the result is asked for
                    future.set_exception(error)
                else:
                    future.set_result(found)
                    del found
            del future, work, task

    def _next(self) -> tuple["Future[Any]", Callable[[], Any]] | None:
        """The next task; None where there was none for a while, and the thread ends."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._tasks, IDLE_S)
            self._num_idle -= 1
            if self._tasks:
                return self._tasks.popleft()
            self._num_threads -= 1
            return None


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
