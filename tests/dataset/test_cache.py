"""The cache: its budget, its order, and many threads at once."""

import random
import threading

from dataserver.dataset.cache import LruCache


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
    cache.drop("bbbb")
    cache.drop("never there")
    get("bbbb")
    assert loads[-1] == "bbbb"


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
