"""The cache that bounds what is kept of all jobs."""

import gc
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass

import pytest

from dataserver.dataset import EvictionCounts, evictions
from dataserver.jobs import IsCancelled, SingleFlightCache


@dataclass
class Thing:
    cost: int


def cache(budget: int) -> SingleFlightCache[int, Thing]:
    return SingleFlightCache(budget, lambda thing: thing.cost)


def test_what_was_used_least_recently_goes_first_and_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(key: int) -> Thing:
        made.append(key)
        return Thing(10)

    things = cache(30)
    for key in (1, 2, 3, 1, 4):
        things.get(key, lambda _, key=key: make(key))
    assert made == [1, 2, 3, 4]
    assert [things.find(key) is not None for key in (1, 2, 3, 4)] == [True, False, True, True]
    things.get(2, lambda _: make(2))
    assert made == [1, 2, 3, 4, 2]
    assert len(things.values()) == 3
    assert things.evictions == EvictionCounts(evicted=2, remade=1)
    monkeypatch.setattr(evictions, "monotonic", lambda: time.monotonic() + evictions.SOON_S)
    things.get(1, lambda _: make(1))
    assert things.evictions == EvictionCounts(evicted=3, remade=1), "so late it is no longer in use"


def test_what_somebody_holds_is_found_whatever_it_costs_and_kept_again() -> None:
    things = cache(10)
    held = things.get(1, lambda _: Thing(8))
    things.get(2, lambda _: Thing(9))
    assert things.find(1) is held
    assert things.find(2) is None, "1 is the one used last, and both do not fit"
    large = things.get(3, lambda _: Thing(1000))
    assert things.get(3, lambda _: Thing(1)) is large
    del large
    assert things.find(3) is not None, "the one used last is kept"


def test_a_value_that_grew_is_counted_at_its_new_cost() -> None:
    things = cache(30)
    growing = things.get(1, lambda _: Thing(10))
    things.get(2, lambda _: Thing(10))
    growing.cost = 25
    things.put(1, growing)
    assert things.find(2) is None


def test_dropped_keys_are_gone() -> None:
    things = cache(100)
    for key in range(4):
        things.get(key, lambda _: Thing(10))
    things.drop(lambda key: key % 2 == 0)
    assert [things.find(key) is not None for key in range(4)] == [False, True, False, True]
    for key in range(10, 18):
        things.get(key, lambda _: Thing(10))
    assert len(things.values()) == 10, "what was dropped costs nothing any more"


def test_one_thread_makes_and_an_error_reaches_all_and_is_not_kept() -> None:
    things, started, go = cache(100), threading.Event(), threading.Event()
    calls: list[int] = []

    def fail(_: IsCancelled) -> Thing:
        calls.append(1)
        started.set()
        go.wait(20)
        raise ValueError("no")

    errors: list[Exception] = []
    waiting = [threading.Event() for _ in range(4)]

    def ask(asked: threading.Event) -> None:
        try:
            things.get(1, fail, asked.set)  # which answers None: still wanted
        except ValueError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(asked,)) for asked in waiting]
    threads[0].start()
    assert started.wait(20)
    for thread in threads[1:]:
        thread.start()
    for asked in waiting[1:]:
        assert asked.wait(20)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 4
    assert calls == [1]
    assert things.get(1, lambda _: Thing(5)).cost == 5
    with pytest.raises(ValueError, match="no"):
        things.get(2, fail)


def test_a_value_whose_cost_cannot_be_found_is_an_error_and_not_kept() -> None:
    things: SingleFlightCache[int, Thing] = SingleFlightCache(100, lambda thing: 10 // thing.cost)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            things.get(1, lambda _: Thing(0))
    assert things.get(1, lambda _: Thing(5)).cost == 5


def test_what_failed_work_held_is_free_at_once() -> None:
    """Not only when garbage is collected: it may be a stream with its job."""
    held = list[weakref.ref[Thing]]()

    def fail(_unwanted: IsCancelled) -> Thing:
        local = Thing(1)
        held.append(weakref.ref(local))
        raise ValueError("no")

    gc.disable()
    try:
        with suppress(ValueError):
            cache(30).get(1, fail)
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()
