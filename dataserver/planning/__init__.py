"""From metadata to plans. Pure: arrays in, arrays out, no I/O.

Here is what all parts of planning use: types of arrays, and the points at which planning can be interrupted. Planning
calls `yield_point` between bounded pieces of work. By itself that does nothing. A server uses it to share planning time
between jobs, and to give up a plan that nobody waits for. What is planned does not depend on it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]


def _go_on() -> None:
    """Do nothing, since no other job waits to plan."""


_at_yield_point: ContextVar[Callable[[], None]] = ContextVar("at_yield_point", default=_go_on)


def yield_point() -> None:
    """A point at which planning may wait, or end with an exception."""
    _at_yield_point.get()()


@contextmanager
def yielding_to(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` at every yield point of what runs inside, in this thread."""
    token = _at_yield_point.set(call)
    try:
        yield
    finally:
        _at_yield_point.reset(token)


_MOST_THREADS = 256
CALLS_OF_A_THREAD = 4
"""Calls for each thread between two yield points: with fewer, all threads wait more often for the longest call."""
_cores: ContextVar[Callable[[], int]] = ContextVar("cores", default=lambda: 1)
Result = TypeVar("Result")


@contextmanager
def computing_on(count: int | Callable[[], int]) -> Iterator[None]:
    """Let what runs inside, in this thread, use so many cores, asked for at each use; by itself planning uses one."""
    token = _cores.set(count if callable(count) else lambda: count)
    try:
        yield
    finally:
        _cores.reset(token)


def cores() -> int:
    """How many cores planning may use here."""
    return _cores.get()()


def side_by_side(calls: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """What the calls return. So many threads take them as they come; none must depend on what another one computes.

    Where calls fail, no thread takes another one; when all have ended, the error of the first call is raised that
    failed, as if they had been called in turn. Where the system gives fewer threads, those do all.
    """
    numbers, found, failed = itertools.count(), dict[int, Result](), dict[int, BaseException]()

    def take() -> None:
        while not failed and (number := next(numbers)) < len(calls):
            try:
                found[number] = calls[number]()
            except BaseException as error:
                failed[number] = error

    others = [_in_a_thread(take) for _ in range(min(threads, len(calls)) - 1)]
    take()
    for other in filter(None, others):
        other.result()
    if failed:
        raise failed.pop(min(failed))
    return [found[number] for number in range(len(calls))]


def _in_a_thread(take: Callable[[], None]) -> Future[None] | None:
    """A call that never fails, in another thread; None where there is none, and then none runs it later."""
    found = Future[None]()

    def run() -> None:
        if found.set_running_or_notify_cancel():
            take()
            found.set_result(None)

    try:
        _threads().submit(run)
    except RuntimeError:  # none can be started, but another plan's may have come to it
        return None if found.cancel() else found
    return found


def shared_out(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the calls return: a thread on each core takes them as they come; then a yield point, and as many more.

    Yield points within a call are those of the thread that plans alone. While it waits at one, the others go on with
    what is left of the round, calls of some ten milliseconds; once it gives up, they end the calls that they have.
    """
    found, left = list[Result](), list(calls)
    while left:
        yield_point()
        threads = max(1, cores())
        at_once = CALLS_OF_A_THREAD * threads
        found += side_by_side(left[:at_once], threads)
        left = left[at_once:]
    return found


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """Threads that wait for calls, begun when they are needed."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="planning")
