"""The cache: its budget, its order, and many threads at once."""

import random
import threading

from dataserver.dataset import EvictionCounts
from dataserver.dataset.cache import LruCache
from dataserver.dataset.evictions import MAX_REMEMBERED, Evictions


def test_least_recently_used_goes_first() -> None:
    loads: list[str] = []
    cache: LruCache[str] = LruCache(10, len)

    def get(key: str) -> str:
        return cache.get(key, lambda: loads.append(key) or key)  # type: ignore[func-returns-value]

    for key in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb"):
        assert get(key) == key
    assert loads == ["aaaa", "bbbb", "cccc", "bbbb"]
    assert get("x" * 11) == "x" * 11
    assert get("bbbb") == "bbbb"
    assert get("x" * 11) == "x" * 11
    assert loads == ["aaaa", "bbbb", "cccc", "bbbb", "x" * 11, "x" * 11]
    assert cache.evictions == EvictionCounts(evicted=4, remade=2), "what finds no room is dropped at once"
    cache.drop("bbbb")
    cache.drop("never there")
    get("bbbb")
    assert loads[-1] == "bbbb"
    assert cache.evictions == EvictionCounts(evicted=4, remade=2), "nobody lacked room for it"


def test_evictions_of_many_keys_are_counted_in_bounded_memory() -> None:
    found = Evictions()
    for key in range(2 * MAX_REMEMBERED):
        found.dropped(key)
    found.made(0)
    found.made(2 * MAX_REMEMBERED - 1)
    assert found.counts == EvictionCounts(evicted=2 * MAX_REMEMBERED, remade=1)
    assert len(found._dropped) == MAX_REMEMBERED - 1


def test_many_threads_see_their_own_values() -> None:
    cache: LruCache[int] = LruCache(20, lambda _: 1)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(3000):
            key = rng.randrange(40)
            if cache.get(key, lambda key=key: key) != key:  # type: ignore[misc]
                wrong.append(key)
            if key % 7 == 0:
                cache.drop(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_that_want_one_value_load_it_once() -> None:
    """Also where it is too large to be held."""
    for budget in (100, 0):
        cache: LruCache[list[int]] = LruCache(budget, len)
        begun, go = threading.Event(), threading.Event()
        loads: list[int] = []

        def load(begun: threading.Event = begun, go: threading.Event = go, loads: list[int] = loads) -> list[int]:
            loads.append(1)
            begun.set()
            assert go.wait(20)
            return [1, 2, 3]

        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda c=cache, f=load, out=found: out.append(c.get("key", f)))  # type: ignore[misc]
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        assert begun.wait(20)
        assert cache.get("other", lambda: [4]) == [4], "nobody else waits"
        threading.Timer(0.2, go.set).start()
        for thread in threads:
            thread.join(20)
        assert len({id(value) for value in found}) == 1
        assert len(found) == 6
        assert loads == [1]


def test_where_loading_fails_those_that_wait_try_themselves() -> None:
    cache: LruCache[str] = LruCache(100, len)
    begun, go, tried = threading.Event(), threading.Event(), list[int]()

    def load() -> str:
        tried.append(1)
        begun.set()
        assert go.wait(20)
        if len(tried) == 1:
            raise OSError("storage")
        return "value"

    found: list[str] = []

    def ask() -> None:
        try:
            found.append(cache.get("key", load))
        except OSError as error:
            found.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    threading.Timer(0.2, go.set).start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == ["storage", "value"]
    assert len(tried) == 2


def test_what_is_dropped_while_it_loads_is_loaded_again() -> None:
    cache: LruCache[str] = LruCache(100, len)
    begun, go, found = threading.Event(), threading.Event(), list[str]()

    def slow() -> str:
        begun.set()
        assert go.wait(20)
        return "old"

    thread = threading.Thread(target=lambda: found.append(cache.get("key", slow)))
    thread.start()
    assert begun.wait(20)
    cache.drop("key")
    assert cache.get("key", lambda: "new") == "new"
    go.set()
    thread.join(20)
    assert found == ["old"]
    assert cache.get("key", lambda: "newest") == "new"
