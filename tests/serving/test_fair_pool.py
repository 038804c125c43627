"""Queues of a pool have their turns, whatever the others have waiting."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
from serving.harness import TIMEOUT_S

from dataserver.serving.metrics import Metrics
from dataserver.serving.stream.fair_pool import FairPool
from dataserver.serving.stream.streams import Streams


@pytest.fixture
def pool() -> Iterator[FairPool]:
    """One with one thread."""
    made = FairPool(1, "test")
    yield made
    made.shutdown()


def test_queues_have_a_task_run_in_turn_however_many_they_have(pool: FairPool) -> None:
    ran, go = list[str](), threading.Event()
    first = pool.queue("x").submit(go.wait, TIMEOUT_S)
    many, few = pool.queue("x"), pool.queue("x")
    futures = [many.submit(ran.append, f"many {i}") for i in range(4)]
    futures += [few.submit(ran.append, f"few {i}") for i in range(2)]
    go.set()
    assert not wait([first, *futures], TIMEOUT_S).not_done
    assert ran == ["many 0", "few 0", "many 1", "few 1", "many 2", "many 3"]


def test_groups_have_turns_however_many_queues_they_have(pool: FairPool) -> None:
    """As jobs, one with many streams, which it may open and cancel anew."""
    ran, go = list[str](), threading.Event()
    first = pool.queue("x").submit(go.wait, TIMEOUT_S)
    many, few = [pool.queue("many") for _ in range(3)], [pool.queue("few")]
    futures = []
    for name, queues in (("many", many), ("few", few)):
        futures += [q.submit(ran.append, f"{name} {n}") for _ in range(2) for n, q in enumerate(queues)]
    go.set()
    assert not wait([first, *futures], TIMEOUT_S).not_done
    assert ran == ["many 0", "few 0", "many 1", "few 0", "many 2", "many 0", "many 1", "many 2"]


def test_what_a_task_gives_or_raises_and_what_is_cancelled(pool: FairPool) -> None:
    queue, go = pool.queue("x"), threading.Event()
    first = queue.submit(go.wait, timeout=TIMEOUT_S)
    cancelled, failed, last = queue.submit(print), queue.submit(int, "x"), queue.submit(int, "7")
    told: list[Future[None]] = []
    cancelled.add_done_callback(told.append)
    assert cancelled.cancel()
    assert told == [cancelled]
    go.set()
    assert first.result(TIMEOUT_S)
    assert isinstance(failed.exception(TIMEOUT_S), ValueError)
    assert last.result(TIMEOUT_S) == 7


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no further thread be started, as the system does where there are too many."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_what_finds_no_thread_of_its_own_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, began, go = FairPool(2, "test"), threading.Event(), threading.Event()
    first = pool.queue("x").submit(lambda: began.set() or go.wait(TIMEOUT_S))  # type: ignore[func-returns-value]
    assert began.wait(TIMEOUT_S)
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        second = pool.queue("y").submit(int, "7")
    assert not second.done()
    go.set()
    assert (first.result(TIMEOUT_S), second.result(TIMEOUT_S)) == (True, 7)
    pool.shutdown()


def test_plans_wait_for_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that comes to another step goes on, though the system gives its plan no thread."""
    given = {"prefetch_bytes": 1 << 20, "job_bytes": 1 << 20, "stream_bytes": 1 << 20, "idle_timeout_s": 60.0}
    config: Any = SimpleNamespace(**given, decode_threads=1, max_streams=2, shared_memory=False)
    streams, began, go = Streams(config, Metrics()), threading.Event(), threading.Event()
    first = streams.shared.planning.submit(lambda: began.set() or go.wait(TIMEOUT_S))  # type: ignore[func-returns-value]
    assert began.wait(TIMEOUT_S)
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        second = streams.shared.planning.submit(int, "7")
    go.set()
    assert (first.result(TIMEOUT_S), second.result(TIMEOUT_S)) == (True, 7)
    streams.close()


def test_what_is_refused_for_want_of_threads_is_never_run(monkeypatch: pytest.MonkeyPatch, pool: FairPool) -> None:
    """Whoever submitted it may have given its memory to others by then."""
    ran, queue = list[str](), pool.queue("x")
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            queue.submit(ran.append, "refused")
    queue.submit(ran.append, "taken").result(TIMEOUT_S)
    assert ran == ["taken"]


def test_what_another_thread_has_run_by_then_is_not_refused(monkeypatch: pytest.MonkeyPatch, pool: FairPool) -> None:
    def refuse(run_next: Callable[[], None]) -> None:
        run_next()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool._threads, "submit", refuse)
    assert pool.queue("x").submit(int, "7").result(0) == 7


def test_a_pool_that_ends_finishes_what_runs_and_cancels_what_waits(pool: FairPool) -> None:
    queue, began, go = pool.queue("x"), threading.Event(), threading.Event()

    def work() -> int:
        began.set()
        return int(go.wait(TIMEOUT_S))

    running, waiting = queue.submit(work), pool.queue("y").submit(print)
    assert began.wait(TIMEOUT_S)
    waiting.add_done_callback(lambda _: queue.tasks.clear())  # it may take locks, so none is held
    threading.Timer(0.05, go.set).start()
    pool.shutdown()
    assert running.result(0) == 1
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="after shutdown"):
        queue.submit(print)
