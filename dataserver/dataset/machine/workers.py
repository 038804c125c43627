"""Spawned processes that share out a lot of work, and end with the one that started them."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Executor, Future, wait
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from dataserver.dataset.errors import DatasetError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnContext

LOOK_S: Final = 0.25
"""Time between two looks at whether the work is still wanted."""
Task = TypeVar("Task")
Result = TypeVar("Result")


class LostWorkerError(DatasetError):
    """A process that did a part of the work died: says nothing about the dataset."""


class Engine(Protocol):
    """What shares out a lot of work over several machines."""

    num_workers: int
    """Tasks at a time, by default."""

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Yield the position of each task and what `work` made of it, as they are done.

        Args:
            work: a function of a module, called on some machine. It may be called again where one was lost.
            tasks: what it is called with.
            num_workers: tasks at a time.

        Raises:
            Exception: what `work` raised.
        """


def shared_out(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    num_workers: int,
    engine: Engine | None,
    ahead: int | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield the position of each task and what `work` made of it: by an engine, in processes, or in this process.

    Args:
        work: see `Engine.run`.
        tasks: likewise.
        num_workers: tasks at a time; where there is no engine, one works in this process.
        engine: None for this machine alone.
        ahead: see `in_processes`; an engine takes all tasks at once.
    """
    num_workers = min(num_workers, len(tasks))
    if engine is not None:
        return engine.run(work, tasks, num_workers)
    if num_workers <= 1:
        return enumerate(map(work, tasks))
    return in_processes(work, tasks, num_workers, ahead=ahead)


def in_processes(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    num_workers: int,
    look: Callable[[], object] = lambda: None,
    niceness: int = 0,
    ahead: int | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield the position of each task and what `work` made of it, as they are done.

    Args:
        work: a function of a module, called in another process.
        tasks: what it is called with.
        num_workers: processes.
        look: called often in this process; what it raises ends the work.
        niceness: by how much the processes give way to others.
        ahead: tasks that are begun at most from the first one on whose result is missing, so that few results wait for
            it where they are wanted in order; None for all.

    Raises:
        LostWorkerError: a process died.
        DatasetError: this system has nothing that processes share work by.
        Exception: what `work` or `look` raised; what has not begun is not done then.
    """
    # Most servers never need processes of their own, and all begin sooner without what starts them.
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool

    context = multiprocessing.get_context("spawn")
    until, wanted = context.Pipe(duplex=False)  # the processes end when it is closed
    with until, wanted, _pool(context, num_workers, niceness, until) as executor:
        try:
            futures, begun = _submit(executor, work, tasks[:ahead], 0), len(tasks[:ahead])
            until_when = ALL_COMPLETED if ahead is None else FIRST_COMPLETED  # which takes time for each of the futures
            while futures:
                done, _ = wait(futures, LOOK_S, until_when)
                look()
                for future in done:
                    yield futures.pop(future), future.result()
                if ahead is not None:
                    more = tasks[begun : min(futures.values(), default=begun) + ahead]
                    futures |= _submit(executor, work, more, begun)
                    begun += len(more)
        except BrokenProcessPool as error:
            raise LostWorkerError("a worker process died, perhaps for lack of memory; use fewer workers") from error
        except (KeyboardInterrupt, GeneratorExit):  # nobody waits for what they have begun
            wanted.close()
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _pool(context: "SpawnContext", num_workers: int, niceness: int, until: "Connection[bytes, bytes]") -> Executor:
    from concurrent.futures.process import ProcessPoolExecutor

    try:
        return ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(niceness, until))
    except OSError as error:
        raise DatasetError(
            f"processes cannot share the work here ({error.strerror}): mount /dev/shm as a folder that this user can "
            "write to, or use one worker"
        ) from error


def _submit(
    executor: Executor, work: Callable[[Task], Result], tasks: Sequence[Task], first: int
) -> dict[Future[Result], int]:
    """Submit tasks, whose numbers begin with `first`, with Ctrl-C blocked: workers are spawned here and inherit that
    until `_begin`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {executor.submit(work, task): position for position, task in enumerate(tasks, first)}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(niceness: int, until: "Connection[bytes, bytes]") -> None:
    """End this worker on Ctrl-C without a traceback, when its parent dies, and when the other end of `until` is closed.

    Without that a worker whose parent was killed would wait for ever: it holds both ends of the pool's queue. And one
    whose parent is told to end by a signal would end its task first, which may be a shard of many gigabytes.
    """
    import multiprocessing

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.nice(niceness)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=([parent.sentinel, until],), daemon=True).start()


def _exit_after(any_of: "list[int | Connection[bytes, bytes]]") -> None:
    import multiprocessing.connection

    multiprocessing.connection.wait(any_of)
    os._exit(1)
