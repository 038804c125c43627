"""Spawned processes that share out a lot of work, and end with the one that started them."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Final, TypeVar

from dataserver.dataset.errors import DatasetError

LOOK_S: Final = 0.25
"""Time between two looks at whether the work is still wanted."""
Task = TypeVar("Task")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    num_workers: int,
    look: Callable[[], object] = lambda: None,
    niceness: int = 0,
) -> Iterator[tuple[int, Result]]:
    """Yield the position of each task and what `work` made of it, as they are done.

    Args:
        work: a function of a module, called in another process.
        tasks: what it is called with.
        num_workers: processes.
        look: called often in this process; what it raises ends the work.
        niceness: by how much the processes give way to others.

    Raises:
        DatasetError: a process died.
        Exception: what `work` or `look` raised; what has not begun is not done then.
    """
    # Most servers never need processes of their own, and all begin sooner without what starts them.
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(niceness,)) as executor:
        try:
            futures = _submit(executor, work, tasks)
            while futures:
                done, _ = wait(futures, LOOK_S)  # to wait for the first one would cost time that grows with the tasks
                look()
                for future in done:
                    yield futures.pop(future), future.result()
        except BrokenProcessPool as error:
            raise DatasetError("a worker process died, perhaps for lack of memory; use fewer workers") from error
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _submit(executor: Executor, work: Callable[[Task], Result], tasks: Sequence[Task]) -> dict[Future[Result], int]:
    """Submit all tasks, with Ctrl-C blocked: workers are spawned here and inherit that until `_begin`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {executor.submit(work, task): position for position, task in enumerate(tasks)}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(niceness: int) -> None:
    """End this worker on Ctrl-C without a traceback, and when its parent dies.

    Without the second a worker whose parent was killed would wait for ever: it holds both ends of the pool's queue.
    """
    import multiprocessing

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.nice(niceness)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    import multiprocessing.connection

    multiprocessing.connection.wait([sentinel])
    os._exit(1)
