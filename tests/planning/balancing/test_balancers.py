"""All balancers: caps, theorems, brute force, published checks."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dataserver.planning import I64
from dataserver.planning.balancing import (
    BALANCERS,
    BinBudget,
    bin_loads,
    longest_first,
    lower_bound,
    padded,
    searched,
)

LOADS = st.lists(st.integers(0, 60), max_size=7)
NAMES = st.sampled_from(sorted(BALANCERS))


def assignments(count: int, num_bins: int, capacity: int) -> I64:
    """Every one that the capacity allows, each a row."""
    every = np.array([*product(range(num_bins), repeat=count)], np.int64).reshape(num_bins**count, count)
    return every[(bin_loads_of_each(np.ones(count, np.int64), every, num_bins) <= capacity).all(axis=0)]


def bin_loads_of_each(loads: list[int] | I64, every: I64, num_bins: int) -> I64:
    """What each bin (row) holds in each assignment (column)."""
    return np.stack([(every == b) @ np.array(loads, np.int64) for b in range(num_bins)])


def heaviest_of_each(loads: list[int] | I64, every: I64, num_bins: int) -> I64:
    """By assignment."""
    return bin_loads_of_each(loads, every, num_bins).max(axis=0)


def heaviest(loads: list[int] | I64, bins: I64, num_bins: int) -> int:
    return int(bin_loads(np.array(loads, np.int64), bins, num_bins).max())


def padded_cost(loads: list[int], bins: list[int], num_bins: int) -> int:
    groups = [[load for load, b in zip(loads, bins, strict=True) if b == k] for k in range(num_bins)]
    return max(len(group) * max(group, default=0) for group in groups)


@given(NAMES, st.lists(st.integers(0, 10**15), max_size=40), st.integers(1, 8), st.none() | st.integers(0, 3))
def test_every_item_is_placed_and_counts_are_capped(name: str, loads: list[int], m: int, spare: int | None) -> None:
    capacity = None if spare is None else -(-len(loads) // m) + spare
    given_loads = np.array(loads, np.int64)
    given_loads.flags.writeable = False
    bins = BALANCERS[name](given_loads, m, capacity)
    assert bins.dtype == np.int64
    assert len(bins) == len(loads)
    counts = np.bincount(bins, minlength=m)
    assert len(counts) == m
    assert capacity is None or counts.max() <= capacity
    if spare == 0 and len(loads) % m == 0:
        assert len(set(counts.tolist())) == 1


@given(NAMES, LOADS, st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=80)
def test_bounds_and_search_against_every_assignment(name: str, loads: list[int], m: int, spare: int) -> None:
    capacity = -(-len(loads) // m) + spare
    optimum = int(heaviest_of_each(loads, assignments(len(loads), m, capacity), m).min())
    bound = lower_bound(np.array(loads, np.int64), m, capacity)
    found = heaviest(loads, BALANCERS[name](np.array(loads, np.int64), m, capacity), m)
    assert bound <= optimum <= found
    if name == "search":
        assert found == optimum  # with these sizes the budget lets no optimum escape


@given(LOADS, st.integers(1, 3))
@settings(max_examples=60)
def test_bound_without_a_cap(loads: list[int], m: int) -> None:
    optimum = int(heaviest_of_each(loads, assignments(len(loads), m, len(loads)), m).min())
    assert lower_bound(np.array(loads, np.int64), m) <= optimum


@pytest.mark.parametrize(
    ("loads", "num_bins", "capacity", "bound"),
    [
        ([5, 4, 3, 3, 3], 2, None, 9),  # the mean
        ([9, 1, 1, 1], 2, 2, 10),  # the largest and the one smallest that must join it
        ([4, 4, 4], 2, None, 8),  # two of three share a bin
        ([10, 10, 1, 2, 3, 3], 2, 3, 15),  # the mean again
        ([10, 10, 1, 1, 3, 3], 3, 2, 11),
        ([20, 19, 1, 2, 9, 9], 3, 2, 21),  # both large ones need a partner: 20 + 1 and 19 + 2
        ([20, 20, 1, 3, 9, 9], 3, 2, 22),  # (20 + 20 + 1 + 3) / 2, though 20 + 1 = 21
    ],
)
def test_bounds_by_hand(loads: list[int], num_bins: int, capacity: int | None, bound: int) -> None:
    assert lower_bound(np.array(loads), num_bins, capacity) == bound


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9), st.booleans(), st.integers(0, 5000))
def test_search_never_worsens_its_seed(loads: list[int], m: int, equal: bool, budget: int) -> None:
    capacity = -(-len(loads) // m) if equal else None
    given_loads = np.array(loads, np.int64)
    before = heaviest(loads, longest_first(given_loads, m, capacity), m)
    assert heaviest(loads, searched(given_loads, m, capacity, looks=budget), m) <= before


def test_search_ends_close_to_the_bound() -> None:
    draw = np.random.default_rng(5)
    for sigma in (0.75, 1.2):
        loads = (draw.lognormal(0, sigma, 2048) * 1_000_000).astype(np.int64)
        bound = lower_bound(loads, 128, 16)
        assert heaviest(loads, longest_first(loads, 128, 16), 128) >= bound
        assert heaviest(loads, searched(loads, 128, 16), 128) <= bound + bound // 2000


@given(st.lists(st.integers(0, 20), max_size=7), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=100)
def test_padded_batches_are_optimal(loads: list[int], m: int, spare: int) -> None:
    """Against every assignment, contiguous or not."""
    capacity = -(-len(loads) // m) + spare
    optimum = min(padded_cost(loads, bins, m) for bins in assignments(len(loads), m, capacity).tolist())
    found = padded(np.array(loads, np.int64), m, capacity)
    assert padded_cost(loads, found.tolist(), m) == optimum


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=50)
def test_padded_batches_with_a_quadratic_term(lengths: list[int], m: int) -> None:
    def cost(count: int, longest: int) -> int:
        return 3 * count * longest + 2 * count * longest**2

    def slowest(bins: list[int]) -> int:
        groups = [[x for x, b in zip(lengths, bins, strict=True) if b == k] for k in range(m)]
        return max(cost(len(group), max(group, default=0)) for group in groups)

    optimum = min(slowest(bins) for bins in assignments(len(lengths), m, len(lengths)).tolist())
    tokens = np.array(lengths, np.int64)
    assert slowest(padded(3 * tokens + 2 * tokens**2, m).tolist()) == optimum


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 3), st.none() | st.integers(0, 2), st.integers(0, 80))
@settings(max_examples=80)
def test_padded_batches_within_a_memory_are_optimal(sizes: list[int], m: int, spare: int | None, cap: int) -> None:
    """Against every assignment; refused exactly if none keeps the cap, with the memory that would do."""
    loads, needs = [3 * size + size * size for size in sizes], [size // 2 + 1 for size in sizes]  # needs tie, loads not
    capacity = None if spare is None else -(-len(sizes) // m) + spare
    memory = BinBudget(np.array(needs, np.int64), max(cap, *needs, -(-sum(needs) // m)) if needs else cap)
    every = assignments(len(sizes), m, len(sizes) if capacity is None else capacity).tolist()
    possible = [bins for bins in every if padded_cost(needs, bins, m) <= memory.cap]
    if possible:
        found = padded(np.array(loads, np.int64), m, capacity, memory).tolist()
        assert found in possible
        assert padded_cost(loads, found, m) == min(padded_cost(loads, bins, m) for bins in possible)
    else:
        least = min(padded_cost(needs, bins, m) for bins in every)
        with pytest.raises(ValueError, match=f"padded items need {least} of memory .* a bin has {memory.cap};"):
            padded(np.array(loads, np.int64), m, capacity, memory)


def test_padded_batches_whose_loads_tie() -> None:
    """Loads of 5 with needs of 9, 1, 1, 1: of these the largest need comes first, so that it is alone."""
    bins = padded(np.array([5, 5, 5, 5]), 2, None, BinBudget(np.array([1, 1, 9, 1]), 10))
    assert bins.tolist() == [1, 1, 0, 1]


def test_padded_batches_need_needs_that_follow_the_loads() -> None:
    with pytest.raises(ValueError, match="item 1 has load 9 and needs 2 of memory, item 2 has load 7 and needs 3"):
        padded(np.array([1, 9, 7]), 2, None, BinBudget(np.array([1, 2, 3]), 10))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=30),
    st.integers(1, 5),
    st.integers(0, 30),
    st.booleans(),
)
def test_memory_is_kept(items: list[tuple[int, int]], m: int, spare: int, equal: bool) -> None:
    loads, need = (np.array(column, np.int64) for column in zip(*items, strict=True))
    memory = BinBudget(need, max(int(need.max()), -(-int(need.sum()) // m)) + spare)
    capacity = -(-len(items) // m) if equal else None
    try:
        first = longest_first(loads, m, capacity, memory)
    except ValueError as error:
        assume("found no way" not in str(error))
        raise
    best = searched(loads, m, capacity, memory)
    for bins in (first, best):
        assert bin_loads(need, bins, m).max() <= memory.cap
        assert capacity is None or np.bincount(bins).max() <= capacity
    assert heaviest(loads, best, m) <= heaviest(loads, first, m)


def test_a_way_to_keep_the_memory_is_found_where_there_is_one() -> None:
    """Against every assignment, under caps that leave little or no room."""
    draw, tight = np.random.default_rng(0), 0
    for _ in range(300):
        count, m = int(draw.integers(3, 8)), int(draw.integers(2, 4))
        loads, need = draw.integers(0, 60, count), draw.integers(1, 20, count)
        capacity = (count, -(-count // m))[int(draw.integers(0, 2))]
        memory = BinBudget(need, max(int(need.max()), -(-int(need.sum()) // m)) + int(draw.integers(0, 3)))
        if heaviest_of_each(need, assignments(count, m, capacity), m).min() <= memory.cap:
            assert heaviest(need, longest_first(loads, m, capacity, memory), m) <= memory.cap
            tight += heaviest(need, longest_first(loads, m, capacity), m) > memory.cap
        else:
            with pytest.raises(ValueError, match=r"found no way|alone|bins of \d+ have"):
                longest_first(loads, m, capacity, memory)
    assert tight > 100  # without a memory they would have exceeded it


def test_memory_that_is_kept_already_changes_nothing() -> None:
    draw = np.random.default_rng(4)
    loads, need = draw.integers(0, 1000, 60), draw.integers(0, 1000, 60)
    bins = longest_first(loads, 6, 10)
    roomy = BinBudget(need, int(bin_loads(need, bins, 6).max()))
    assert longest_first(loads, 6, 10, roomy).tolist() == bins.tolist()


def test_memory_that_is_met_in_one_way_only() -> None:
    """By load the two halves would go apart; by need 6 + 4 and 5 + 3 + 2 alone fit 10."""
    memory = BinBudget(np.array([6, 5, 4, 3, 2]), 10)
    bins = longest_first(np.array([1, 1, 9, 9, 9]), 2, None, memory)
    assert bins[0] == bins[2] != bins[1] == bins[3] == bins[4]
    found = searched(np.array([1, 1, 9, 9, 9]), 2, None, memory)
    assert bin_loads(memory.need, found, 2).tolist() == [10, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], 1, 2), "3 items do not fit 1 bins of 2; raise the number of bins"),
        (([1, -2], 2), r"loads from -2 to 1; 2 loads must lie in \[0,"),
        (([2**61, 2**61], 2), "use a coarser unit"),
        (([1], 0), "0 bins; at least 1"),
        (([1, 1], 2, None, BinBudget(np.array([1]), 4)), "memory of 1 items for loads of 2"),
        (([], 1, None, BinBudget(np.array([], np.int64), -1)), "bins have -1 of memory"),
        (
            ([1, 1], 2, None, BinBudget(np.array([1, 5]), 4)),
            r"\(item 1\); each must lie in \[0, 4\], the memory of a bin",
        ),
        (([1, 1, 1], 2, None, BinBudget(np.array([4, 4, 4]), 5)), "items need 12 of memory, 2 bins of 5 have 10"),
        (
            ([1, 1, 1], 2, None, BinBudget(np.array([3, 3, 3]), 5)),
            "found no way to place 3 items within the memory of 2 bins of 5: one of them would need 6",
        ),
    ],
)
def test_refusals(arguments: tuple, message: str) -> None:  # type: ignore[type-arg]
    for balancer in (longest_first, searched):
        with pytest.raises(ValueError, match=message):
            balancer(np.array(arguments[0], np.int64), *arguments[1:])


@given(st.permutations([200, 400, 600, 800, 1000] * 8), st.sampled_from(["lpt", "search"]))
def test_veomnis_check(lengths: list[int], name: str) -> None:
    loads = np.array(lengths, np.int64) ** 2
    assert bin_loads(loads, BALANCERS[name](loads, 8), 8).tolist() == [2_200_000] * 8


@given(st.lists(st.integers(0, 50), max_size=50), st.integers(1, 7), st.integers(0, 4))
def test_the_heap_gives_what_a_scan_for_the_lightest_gives(loads: list[int], m: int, spare: int) -> None:
    capacity = -(-len(loads) // m) + spare
    total, count, expected = [0] * m, [0] * m, [0] * len(loads)
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        chosen = min((b for b in range(m) if count[b] < capacity), key=lambda b: (total[b], b))
        expected[item] = chosen
        total[chosen] += loads[item]
        count[chosen] += 1
    assert longest_first(np.array(loads, np.int64), m, capacity).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=40), st.integers(1, 7))
def test_the_memory_heap_gives_what_a_scan_gives(items: list[tuple[int, int]], m: int) -> None:
    from dataserver.planning.kernels import greedy

    loads, need = (np.array(column, np.int64) for column in zip(*items, strict=True))
    cap = max(int(need.max()), -(-int(need.sum()) // m))
    total, used, expected, failed = [0] * m, [0] * m, [-1] * len(items), -1
    order = np.argsort(-loads, kind="stable")
    for item in order.tolist():
        open_bins = [b for b in range(m) if used[b] + need[item] <= cap]
        if not open_bins:
            failed = item
            break
        expected[item] = chosen = min(open_bins, key=lambda b: (total[b], b))
        total[chosen] += int(loads[item])
        used[chosen] += int(need[item])
    bins, left_over = greedy.longest_first_within(loads, need, order, m, len(items), cap)
    assert (bins.tolist(), left_over) == (expected, failed)


def test_pools_are_worse_than_all_ranks_together() -> None:
    """Libra's law for pools of P of D ranks: on average at most 1 + CV / sqrt(P) x sqrt(2 ln(D / P))."""
    pooled, together = [], []
    for seed in range(10):
        loads = (np.random.default_rng(seed).lognormal(0, 0.75, 2048) * 1e6).astype(np.int64)
        pooled.append(loads.reshape(16, 128).sum(axis=1).max() * 16 / loads.sum())
        together.append(heaviest(loads, searched(loads, 128, 16), 128) * 128 / loads.sum())
    variation = np.sqrt(np.exp(0.75**2) - 1) / 4
    assert 1.05 < np.mean(pooled) <= 1 + variation / np.sqrt(8) * np.sqrt(2 * np.log(16))
    assert max(together) < min(pooled)


def test_memory_capped_search_against_every_assignment() -> None:
    """Exchanges between two bins need not reach the optimum under a tight cap; with few items they nearly always do."""
    draw, optimal = np.random.default_rng(0), 0
    for _ in range(200):
        count, m = int(draw.integers(3, 8)), int(draw.integers(2, 4))
        loads, need = draw.integers(0, 60, count), draw.integers(1, 20, count)
        memory = BinBudget(need, max(int(need.max()), -(-int(need.sum()) // m)) + 6)
        every = assignments(count, m, count)
        best = int(heaviest_of_each(loads, every[heaviest_of_each(need, every, m) <= memory.cap], m).min())
        found = heaviest(loads, searched(loads, m, None, memory), m)
        assert found >= best
        optimal += found == best
    assert optimal >= 190
