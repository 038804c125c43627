"""Threads that several queues share: a turn for each group of queues, and within a group one for each queue.

In one queue for all, each task waits as long as the others, so whoever has more of them there gets more done: a stream
whose microbatches are small just now, or whose consumer is quick; or a job with many streams.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Threads(ThreadPoolExecutor):
    """Takes work where no further thread can be started: one that there is comes to it."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


class FairPool:
    """Threads that run one task of each group after the other, of its queues in turn; who has none holds up nobody."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = Threads(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[Queue]] = OrderedDict()
        """By group, the queues that have tasks, each of them once; the first one of the first group is next."""

    def queue(self, group: str) -> "Queue":
        """Return a new queue, which need not be closed, in a group whose queues take turns as one."""
        return Queue(self, group)

    def shutdown(self) -> None:
        """Take no further tasks, wait for those that run, and cancel all others."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            futures = [task.future for queues in self._waiting.values() for queue in queues for task in queue.tasks]
        for future in futures:  # without the lock: callbacks run here
            future.cancel()

    def put(self, queue: "Queue", task: "Task") -> None:
        """Have a task run after one task of each group that waits before its own, or of each queue of its group.

        Raises:
            RuntimeError: after `shutdown`, or there is no thread and none can be started. The task is not run then.
        """
        with self._lock:
            if not queue.tasks:
                self._waiting.setdefault(queue.group, deque()).append(queue)
            queue.tasks.append(task)
        try:
            self._threads.submit(self._run_next)  # not before: it must find one
        except RuntimeError:
            if task.future.cancel():  # else a thread of another task has begun it
                raise

    def _run_next(self) -> None:
        """Run one task, which may be another one than that for which this was submitted: there are as many."""
        with self._lock:
            group, queues = self._waiting.popitem(last=False)
            queue = queues.popleft()
            task = queue.tasks.popleft()
            if queue.tasks:
                queues.append(queue)
            if queues:
                self._waiting[group] = queues
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
    group: str
    tasks: deque[Task] = field(default_factory=deque)
    """Those that wait. Guarded by the pool."""

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Submit a call, as to other executors."""
        future: Future[Result] = Future()
        self.pool.put(self, Task(future, partial(fn, *args, **kwargs)))  # type: ignore[arg-type]
        return future
