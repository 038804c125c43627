"""Threads that several queues share, one task of each after the other.

In one queue for all, each task waits as long as the others, so whoever has more of them there gets more done: a stream
whose microbatches are small just now, or whose consumer is quick.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class FairPool:
    """Threads that run one task of each queue after the other. Queues without tasks hold up nobody."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: deque[Queue] = deque()
        """Those that have tasks, each of them once; the first one is next."""

    def queue(self) -> "Queue":
        """A queue of its own, which need not be closed."""
        return Queue(self)

    def shutdown(self) -> None:
        """Take no further tasks, wait for those that run, and cancel all others."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            futures = [task.future for queue in self._waiting for task in queue.tasks]
        for future in futures:  # without the lock: callbacks run here
            future.cancel()

    def put(self, queue: "Queue", task: "Task") -> None:
        """Have a task run after one task of each queue that waits before its own.

        Raises:
            RuntimeError: after `shutdown`.
        """
        with self._lock:
            if not queue.tasks:
                self._waiting.append(queue)
            queue.tasks.append(task)
        self._threads.submit(self._run_next)  # not before: it must find one

    def _run_next(self) -> None:
        """Run one task, which may be another one than that for which this was submitted: there are as many."""
        with self._lock:
            queue = self._waiting.popleft()
            task = queue.tasks.popleft()
            if queue.tasks:
                self._waiting.append(queue)
        task.run()


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What waits for a thread."""

    future: Future[object]
    call: Callable[[], object]

    def run(self) -> None:
        """Run it in this thread, unless it was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.call())
        except BaseException as error:
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True, eq=False)
class Queue(Executor):
    """Tasks of one user of a pool."""

    pool: FairPool
    tasks: deque[Task] = field(default_factory=deque)
    """Those that wait. Guarded by the pool."""

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """As other executors do."""
        future: Future[Result] = Future()
        self.pool.put(self, Task(future, partial(fn, *args, **kwargs)))  # type: ignore[arg-type]
        return future
