import threading

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserver.serving.stream_memory import BufferPool, ByteBudget, size_class

MIB = 1 << 20


@given(st.integers(0, 1 << 40))
def test_size_classes_hold_what_they_are_for_and_waste_at_most_a_quarter(num_bytes: int) -> None:
    capacity = size_class(num_bytes)
    assert capacity >= num_bytes
    assert capacity == 1 << 16 or capacity <= num_bytes * 5 / 4
    assert size_class(capacity) == capacity


def test_a_returned_buffer_is_used_again_and_never_twice() -> None:
    pool = BufferPool(ByteBudget(64 * MIB))
    first = pool.take(3 * MIB)
    assert pool.take(3 * MIB) is not first
    pool.give(first)
    assert pool.take(3 * MIB - 5) is first
    assert pool.take(3 * MIB) is not first


def test_what_is_kept_is_bounded() -> None:
    pool = BufferPool(ByteBudget(4 * MIB))
    buffers = [pool.take(MIB) for _ in range(8)]
    for buffer in buffers:
        pool.give(buffer)
        assert pool.free_bytes <= 4 * MIB
    assert pool.take(MIB) is buffers[-1]


def test_what_is_kept_and_what_is_granted_never_exceed_the_budget_together() -> None:
    budget = ByteBudget(4 * MIB)
    pool, account = BufferPool(budget), budget.open()
    buffers = [pool.take(MIB) for _ in range(4)]
    for buffer in buffers:
        pool.give(buffer)
    assert account.take(3 * MIB)
    assert pool.take(2 * MIB).nbytes == 2 * MIB, "another size"
    assert pool.free_bytes == MIB, "so much is left beside what was granted"
    for buffer in buffers:
        pool.give(buffer)
        assert pool.free_bytes + budget.used <= budget.total
    assert account.take(MIB)
    pool.give(buffers[0])
    assert pool.free_bytes == MIB, "a stream without a budget uses its own again"


def test_what_is_dropped_goes_back_to_the_system() -> None:
    pool, process = BufferPool(ByteBudget(0)), psutil.Process()
    buffers = [pool.take(MIB) for _ in range(64)]
    for buffer in buffers:
        buffer[:] = 1
    full = process.memory_info().rss
    for i in range(0, 64, 2):  # every other one
        pool.give(buffers[i])
        buffers[i] = buffer = np.empty(0, np.uint8)
    assert full - process.memory_info().rss > 24 * MIB


def test_memory_that_there_is_not_is_an_error_of_memory() -> None:
    with pytest.raises(MemoryError, match="for a microbatch"):
        BufferPool(ByteBudget(0)).take(1 << 60)


def test_a_lone_stream_may_have_the_whole_budget_and_two_share_it() -> None:
    budget = ByteBudget(100)
    first = budget.open()
    assert first.take(60)
    assert not first.take(41)
    second = budget.open()
    assert second.take(40)
    first.give(60)
    assert not second.take(20), "half of the budget is the other's"
    assert first.take(50)
    second.close()
    second.give(40)
    assert budget.used == 50


def test_what_streams_take_beside_microbatches_is_part_of_the_budget() -> None:
    budget = ByteBudget(1000, beside=150)
    first = budget.open()
    assert (budget.share, budget.left) == (850, 850)
    second = budget.open()
    assert (budget.share, budget.left) == (350, 700)
    assert first.take(350)
    assert not first.take(1)
    assert not second.take(351), "what is left"
    assert second.take(350)
    for account in (budget.open(), budget.open()):
        account.close()
    third, fourth, fifth = budget.open(), budget.open(), budget.open()
    assert (budget.share, budget.used) == (100, 700), "half of a small share at most"
    assert not third.take(1)
    for account in (first, fourth, fifth):
        account.close()
    first.give(350)
    assert (budget.share, budget.left) == (350, 350)


def test_a_stream_may_exceed_its_share_with_one_microbatch() -> None:
    budget = ByteBudget(100)
    accounts = [budget.open() for _ in range(4)]
    assert accounts[0].take(70)
    assert not accounts[1].take(70)
    assert accounts[1].take(30)
    assert not accounts[2].take(1)


@pytest.mark.parametrize("num_threads", [2, 8])
def test_nothing_is_lost_between_threads(num_threads: int) -> None:
    budget, pool = ByteBudget(1000), BufferPool(ByteBudget(MIB))
    failures: list[int] = []

    def work(seed: int) -> None:
        rng, account = np.random.default_rng(seed), budget.open()
        for _ in range(300):
            size = int(rng.integers(1, 400))
            if account.take(size):
                buffer = pool.take(size)
                buffer[:8] = seed
                if budget.used > 1000 or not (buffer[:8] == seed).all():
                    failures.append(size)
                pool.give(buffer)
                account.give(size)
        account.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert budget.used == 0
