"""Jobs share the places of a server's planning fairly, and work that nobody waits for ends."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from dataserver.jobs import scheduler as scheduler_module
from dataserver.jobs.scheduler import (
    OVERDUE_S,
    SLICE_S,
    FairScheduler,
    IsCancelled,
    WorkCancelledError,
    _Work,
    never_cancelled,
)
from dataserver.jobs.single_flight import SingleFlightCache
from dataserver.planning import cores, yield_point

TIMEOUT_S = 60.0


def until(done: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def compute(slices: int) -> int:
    """Work of that many slices, which can be interrupted often."""
    end = time.thread_time() + slices * SLICE_S
    while time.thread_time() < end:
        yield_point()
    return slices


def endless() -> None:
    """Work that only ends when it is given up."""
    while True:
        yield_point()


def test_a_short_job_need_not_wait_for_long_ones() -> None:
    scheduler, stop = FairScheduler(1), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(scheduler.run, f"long {i}", endless, stop.is_set) for i in range(3)]
        try:
            until(lambda: len(scheduler._begun) == 3)  # each of them computes now and then
            assert pool.submit(scheduler.run, "short", lambda: compute(2)).result(TIMEOUT_S) == 2
        finally:
            stop.set()
        for future in long:
            with pytest.raises(WorkCancelledError):
                future.result(TIMEOUT_S)
    assert not [*scheduler._begun, *scheduler._waiting, *scheduler._working]


def test_a_job_has_one_piece_of_work_begun_at_most() -> None:
    scheduler, here, most, lock = FairScheduler(4), [0], [0], threading.Lock()

    def work() -> None:
        with lock:
            here[0] += 1
            most[0] = max(most[0], here[0])
        compute(2)
        with lock:
            here[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(scheduler.run, "job", work) for _ in range(4)]:
            future.result(TIMEOUT_S)
    assert most == [1]


def test_what_never_comes_to_a_yield_point_holds_nobody_up() -> None:
    scheduler, stop = FairScheduler(1), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(scheduler.run, "stuck", stop.wait)
        until(lambda: bool(scheduler._working))
        assert scheduler.run("other", lambda: compute(1)) == 1
        stop.set()
        assert stuck.result(TIMEOUT_S)


def test_jobs_get_equal_shares() -> None:
    """Whoever did nothing for long has saved nothing up."""
    scheduler, stop, points = FairScheduler(1), threading.Event(), {"first": 0, "second": 0}

    def work(name: str) -> None:
        while True:
            yield_point()
            points[name] += 1
            time.sleep(0.001)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(scheduler.run, "first", lambda: work("first"), stop.is_set)]
        until(lambda: points["first"] > 500)
        before = dict(points)
        futures.append(pool.submit(scheduler.run, "second", lambda: work("second"), stop.is_set))
        until(lambda: points["second"] > 200)
        stop.set()
    assert points["first"] - before["first"] > 50


def stop(scheduler: FairScheduler, work: _Work) -> None:
    """Let it wait for its next turn, and somebody have the one that it had."""
    scheduler._stop(work)
    scheduler._waiting.append(work)
    scheduler._grant()


def test_a_job_that_computed_while_nobody_waited_owes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now))
    scheduler = FairScheduler(1)

    def alone() -> None:
        nonlocal now
        now += 3600.0

    scheduler.run("old", alone)
    new, old = _Work("new", never_cancelled), _Work("old", never_cancelled)
    scheduler._enter(new)
    scheduler._enter(old)
    now += SLICE_S
    stop(scheduler, new)
    assert old.granted, "the new job had its slice"


def test_who_is_ahead_of_the_others_stays_so_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now))
    scheduler, (ahead, behind, back) = (
        FairScheduler(1),
        (_Work(job, never_cancelled) for job in ("ahead", "behind", "ahead")),
    )
    scheduler._enter(ahead)
    scheduler._enter(behind)
    now += 3600.0
    scheduler._leave(ahead)
    scheduler._enter(back)
    now += SLICE_S
    stop(scheduler, behind)
    assert scheduler._working == [behind], "it has used one slice, the other one an hour"


def test_work_may_use_an_equal_share_of_half_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for at each use: less as others come, more when they are gone."""
    monkeypatch.setattr(scheduler_module, "usable_cores", lambda: 13)
    scheduler = FairScheduler()
    found = scheduler.run("first", lambda: (cores(), scheduler.run("second", cores), cores()))
    assert found == (6, 3, 6)
    assert cores() == 1
    monkeypatch.setattr(scheduler_module, "usable_cores", lambda: 1)
    assert FairScheduler().run("alone", cores) == 1


def test_work_is_charged_for_the_cores_that_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(scheduler_module, "usable_cores", lambda: 8)
    scheduler = FairScheduler(1)

    def work(asked: int) -> None:
        nonlocal now
        assert [cores() for _ in range(asked)] == [4] * asked
        now += 1.0
        yield_point()  # what comes behind it, in a slice of its own, asks for none
        now += 1.0

    for asked, charged in {0: 2.0, 1: 5.0, 2: 5.0}.items():
        scheduler.run("job", lambda asked=asked: work(asked))
        assert scheduler._used == {"job": charged}


def test_whoever_becomes_the_first_that_waits_looks_at_once() -> None:
    scheduler, works = FairScheduler(1), [_Work(f"job {i}", never_cancelled) for i in range(3)]
    for work in works:
        scheduler._enter(work)
    assert [work.granted for work in works] == [True, False, False]
    assert [work.woken.is_set() for work in works[1:]] == [True, False]
    assert 0 < scheduler._until_overdue() <= OVERDUE_S
    works[0].seen -= OVERDUE_S
    scheduler._grant()
    assert [work.granted for work in works] == [True, True, False], "the second goes on beside the first"
    assert works[2].woken.is_set()
    works[1].seen -= OVERDUE_S
    assert scheduler._until_overdue() == float("inf")


@dataclass(frozen=True)
class Made:
    """A value; integers cannot be referenced weakly."""

    value: int


def test_a_plan_is_given_up_when_the_last_of_its_callers_leaves() -> None:
    cache, scheduler = SingleFlightCache[int, Made](4, lambda _: 1), FairScheduler(1)
    gone = [threading.Event(), threading.Event()]

    def make(cancelled: IsCancelled) -> Made:
        return scheduler.run("job", lambda: endless() or Made(1), cancelled)

    with ThreadPoolExecutor(2) as pool:
        callers = [pool.submit(cache.get, 0, make, g.is_set) for g in gone]
        until(lambda: bool(scheduler._working) and len(cache._in_flight[0].callers) == 2)
        gone[0].set()  # perhaps the one that computes: the other one's plan goes on
        time.sleep(10 * SLICE_S)
        assert scheduler._working or scheduler._waiting
        gone[1].set()
        for caller in callers:
            with pytest.raises(WorkCancelledError):
                caller.result(TIMEOUT_S)
    assert not cache._in_flight


def test_who_still_waits_gets_the_plan_that_the_first_caller_left() -> None:
    cache, go, left = SingleFlightCache[int, Made](4, lambda _: 1), threading.Event(), threading.Event()

    def make(cancelled: IsCancelled) -> Made:
        assert go.wait(TIMEOUT_S)
        if cancelled():
            raise WorkCancelledError
        return Made(7)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, 0, make, left.is_set)
        until(lambda: 0 in cache._in_flight)
        second = pool.submit(cache.get, 0, make)
        until(lambda: len(cache._in_flight[0].callers) == 2)
        left.set()
        go.set()
        assert second.result(TIMEOUT_S) == Made(7)
        assert first.result(TIMEOUT_S) == Made(7)


def test_a_caller_that_comes_as_the_others_leave_makes_the_value_itself() -> None:
    cache, made = SingleFlightCache[int, Made](4, lambda _: 1), list[int]()

    def give_up(_: IsCancelled) -> Made:
        made.append(0)
        if len(made) == 1:
            raise WorkCancelledError  # nobody waited, until this caller came
        return Made(5)

    assert cache.get(0, give_up) == Made(5)
    assert len(made) == 2
