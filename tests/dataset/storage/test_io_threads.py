"""Threads that wait for stores: each task is run once, no more threads than allowed, and all of them end; what they
hold, and what becomes of tasks where the system gives no thread."""

import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dataserver.dataset.storage import io_threads
from dataserver.dataset.storage.blocks import Blocks
from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.io_threads import IoThreads
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece
from dataserver.dataset.storage.remote import Store as RemoteStore

WAIT_S = 30
IDLE_S = 6.0
"""Longer than a thread takes to let go of what it did."""
INFO = ObjectInfo("a.tar", BLOCK_BYTES, '"v1"', 0)


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


class Bytes(bytearray):
    """Bytes that can be watched."""


class System:
    """Starts threads, or has none left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_threads = True
        start = threading.Thread.start

        def starting(thread: threading.Thread) -> None:
            if not self.has_threads:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starting)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


def test_threads_that_could_not_be_started_count_no_longer(system: System) -> None:
    threads = IoThreads(2, "test")
    system.has_threads = False
    assert all(threads.submit(int).cancelled() for _ in range(3))
    system.has_threads = True
    assert threads.submit(lambda: 7).result(WAIT_S) == 7


def test_what_finds_no_thread_of_its_own_waits_for_another(system: System) -> None:
    threads, going_on = IoThreads(2, "test"), threading.Event()
    first = threads.submit(going_on.wait, WAIT_S)
    while threads.num_waiting:
        time.sleep(0.01)
    system.has_threads = False
    second = threads.submit(lambda: 7)
    going_on.set()
    assert (first.result(WAIT_S), second.result(WAIT_S)) == (True, 7)


class Store:
    """Zeros."""

    name = "s3://bucket"

    def get(self, _wanted: ObjectInfo, _start: int, length: int) -> bytes:
        return bytes(length)


def test_a_block_whose_reading_could_not_begin_is_begun_again(system: System) -> None:
    blocks, store = Blocks(), Store()
    key = BlockKey(store.name, INFO, 0)
    system.has_threads = False
    blocks.need("job", [(key, store)])
    assert key not in blocks.held
    assert blocks.read([Piece(store, INFO, 5, 10)]) == [bytes(10)], "who wants a piece reads it"
    system.has_threads = True
    blocks.need("job", [(key, store)])
    until = time.monotonic() + WAIT_S
    while key not in blocks.held and time.monotonic() < until:
        time.sleep(0.01)
    assert key in blocks.held


@pytest.mark.parametrize("holds_blocks", [False, True])
def test_a_file_of_which_no_thread_reads_a_block_is_read_by_who_wants_it(system: System, holds_blocks: bool) -> None:
    data, asked = bytes(range(251)) * 70_000, list[tuple[int, int]]()

    def get(_: ObjectInfo, start: int, length: int) -> bytes:
        asked.append((start, length))
        return data[start : start + length]

    client: Any = SimpleNamespace(get=get)
    store = RemoteStore(f"s3://without-threads-{holds_blocks}", client)
    system.has_threads = False
    with store.sequential(INFO._replace(num_bytes=len(data)), holds_blocks) as file:
        assert file.read() == data
    starts = range(0, len(data), BLOCK_BYTES)
    assert asked == [(start, min(BLOCK_BYTES, len(data) - start)) for start in starts]


def made(threads: IoThreads) -> "weakref.ref[Any]":
    return weakref.ref(threads.submit(Bytes, b"bytes of a store").result(WAIT_S))


def failed(threads: IoThreads) -> "weakref.ref[Any]":
    future = threads.submit(lambda: 1 / 0)
    assert isinstance(future.exception(WAIT_S), ZeroDivisionError)
    return weakref.ref(future)


def cancelled(threads: IoThreads) -> "weakref.ref[Any]":
    going_on = threading.Event()
    first, second = threads.submit(going_on.wait, WAIT_S), threads.submit(object)
    second.cancel()
    going_on.set()
    assert first.result(WAIT_S)
    while threads.num_waiting:
        time.sleep(0.01)
    return weakref.ref(second)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("last", [made, failed, cancelled])
def test_a_thread_without_work_holds_nothing_of_the_last(
    monkeypatch: pytest.MonkeyPatch, last: Callable[[IoThreads], "weakref.ref[Any]"]
) -> None:
    monkeypatch.setattr(io_threads, "IDLE_S", IDLE_S)
    ref = last(IoThreads(1, "test"))
    until = time.monotonic() + IDLE_S / 2
    while ref() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert ref() is None
