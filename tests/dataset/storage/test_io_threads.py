"""Threads that wait for stores: each task is run once, no more threads than allowed, and all of them end."""

import threading
import time

import pytest

from dataserver.dataset.storage import io_threads
from dataserver.dataset.storage.io_threads import IoThreads

WAIT_S = 30


def test_tasks_that_come_as_threads_end_are_run_and_all_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_threads, "IDLE_S", 0.002)
    pool, running = IoThreads(4, "tried"), set[str]()

    def task(number: int) -> int:
        running.add(threading.current_thread().name)
        return number

    for number in range(200):
        futures = [pool.submit(task, n) for n in range(6)]
        time.sleep(0.001 * (number % 5))
        assert [future.result(WAIT_S) for future in futures] == list(range(6))
        assert pool._num_threads <= 4
    until = time.monotonic() + WAIT_S
    while pool._num_threads:
        assert time.monotonic() < until, "a thread waits without end for a task"
        time.sleep(0.01)
    assert (running, pool.num_waiting, pool._num_idle) == ({"tried"}, 0, 0)


def test_what_a_task_raises_is_raised_where_its_result_is_wanted_and_the_thread_goes_on() -> None:
    pool = IoThreads(1, "tried")

    def end() -> None:
        raise SystemExit(3)

    failed, whole = pool.submit(end), pool.submit(int, "7")
    with pytest.raises(SystemExit):
        failed.result(WAIT_S)
    assert whole.result(WAIT_S) == 7


def test_a_task_that_was_given_up_before_it_began_is_not_run() -> None:
    pool, goes_on = IoThreads(1, "tried"), threading.Event()
    first, second = pool.submit(goes_on.wait, WAIT_S), pool.submit(pytest.fail)
    assert second.cancel()
    goes_on.set()
    assert first.result(WAIT_S)
    assert pool.submit(int).result(WAIT_S) == 0
