"""Limits, texts and bounds of the balancers in digits, and the bound against its own definition in plain loops."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planning.kernels.interpreted import interpreted

from dataserver.planning import I64
from dataserver.planning.balancing import (
    BALANCERS,
    BinBudget,
    bytes_between_nodes,
    fewest_bytes,
    in_runs,
    longest_first,
    lower_bound,
    lower_peaks,
    padded,
    peak_between_nodes,
    searched,
)
from dataserver.planning.balancing.assignment import PAIRS_AT_ONCE, SWAPS, SWAPS_PER_BATCH
from dataserver.planning.balancing.interface import MAX_TOTAL, BinBudgetError, bin_totals, check, search_budget
from dataserver.planning.balancing.search import CLOSE


def text_of(loads: list[int], num_bins: int, capacity: int | None = None, budget: BinBudget | None = None) -> str:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        check(np.array(loads, np.int64), num_bins, capacity, budget)
    in_room = str(refusal.value).startswith(("items need", "needs of memory from 0", "needs of memory from 1"))
    assert isinstance(refusal.value, BinBudgetError) == in_room
    return str(refusal.value)


def budget(need: list[int], cap: int) -> BinBudget:
    return BinBudget(np.array(need, np.int64), cap)


def test_numbers_that_searches_are_bounded_by() -> None:
    node, loads = np.array([0, 1]), np.array([5, 4, 3, 3, 3])
    assert lower_peaks(fewest_bytes(np.eye(2, dtype=np.int64), node, node), [(np.eye(2), node)], node, 9).tolist() == [
        0,
        1,
    ]
    assert np.bincount(searched(loads, 2), loads).tolist() == [9, 9]
    assert (MAX_TOTAL, CLOSE, SWAPS, SWAPS_PER_BATCH, PAIRS_AT_ONCE) == (2**61, 16, 16_384, 4_096, 2**20)
    assert [search_budget(n) for n in (0, 1, 100)] == [16_384, 16_448, 22_784]


def test_what_fits_and_what_does_not() -> None:
    """Both sides of every limit, and what else balancers share, in one go."""
    what_just_fits()
    what_just_does_not_fit()
    padded_totals()
    for loads, bins, capacity, bound in (
        ([9, 1, 1, 1], 2, 2, 10), ([4, 4, 4], 2, None, 8), ([20, 19, 1, 2, 9, 9], 3, 2, 21),
        ([20, 20, 1, 3, 9, 9], 3, 2, 22), ([7, 3], 3, 1, 7), ([], 3, 1, 0), ([5, 4, 4, 1, 1, 1], 2, 4, 8),
    ):  # fmt: skip
        assert lower_bound(np.array(loads, np.int64), bins, capacity) == bound


def what_just_fits() -> None:
    assert check(np.empty(0, np.int64), 1) == 0
    assert check(np.array([0, 7]), 1) == 2
    assert check(np.array([2**61]), 1, 4) == 4
    assert check(np.array([2**60, 2**60]), 1) == 2
    assert check(np.array([1, 1, 1, 1]), 2, 2, budget([0, 5, 5, 0], 5)) == 2
    assert check(np.array([1]), 1, 1, budget([0], 0)) == 1
    assert check(np.empty(0, np.int64), 1, 0, budget([], 0)) == 0


def what_just_does_not_fit() -> None:
    coarser = "use a coarser unit"
    assert text_of([], 0) == "0 bins; at least 1 is required"
    assert text_of([-1, 3], 1) == f"loads from -1 to 3; 2 loads must lie in [0, 2^61 / 2]: {coarser}"
    assert (
        text_of([2**61 + 1], 1)
        == f"loads from {2**61 + 1} to {2**61 + 1}; 1 loads must lie in [0, 2^61 / 1]: {coarser}"
    )
    assert text_of([0, 2**60 + 1], 9) == f"loads from 0 to {2**60 + 1}; 2 loads must lie in [0, 2^61 / 2]: {coarser}"
    assert text_of([1] * 5, 2, 2) == "5 items do not fit 2 bins of 2; raise the number of bins"
    assert text_of([1], 1, None, budget([1, 1], 9)) == "memory of 2 items for loads of 1; one for each is required"
    assert text_of([1], 1, None, budget([1], -1)) == "bins have -1 of memory; at least 0 is required"
    ends = "each must lie in [0, 4], the memory of a bin"
    assert text_of([1, 1, 1], 3, None, budget([1, 5, 0], 4)) == f"needs of memory from 0 to 5 (item 1); {ends}"
    assert text_of([1, 1, 1], 3, None, budget([1, 4, -1], 4)) == f"needs of memory from -1 to 4 (item 1); {ends}"
    assert text_of([1, 1, 1], 2, None, budget([4, 4, 1], 4)) == (
        "items need 9 of memory, 2 bins of 4 have 8; raise the number of bins"
    )


@given(st.lists(st.integers(0, 30), max_size=9), st.integers(1, 4), st.integers(0, 3), st.booleans())
@example([9, 9, 0, 0, 0], 2, 1, True)
@example([8, 8, 8, 1, 1], 3, 0, True)
def test_the_bound_is_its_definition(loads: list[int], bins: int, spare: int, capped: bool) -> None:
    capacity = -(-len(loads) // bins) + spare if capped else len(loads)
    found = lower_bound(np.array(loads, np.int64), bins, capacity if capped else None)
    assert found == bound_by_definition(sorted(loads, reverse=True), bins, capacity)


def bound_by_definition(heavy: list[int], bins: int, capacity: int) -> int:
    """Word by word: some bin holds k + 1 of the k m + 1 heaviest; the j heaviest are apart, or two of them are not."""
    count = len(heavy)

    def lightest(number: int) -> int:
        return sum(heavy[count - number :]) if number > 0 else 0

    def filling(holding: int, of: int) -> int:
        """The lightest items that `of` bins, which hold so many, must take because the others are full."""
        return lightest(count - (bins - of) * capacity - holding)

    bounds = [-(-sum(heavy) // bins)]
    for k in range(count):
        if k * bins + 1 <= count:
            first = heavy[: k * bins + 1]
            bounds.append(sum(first[len(first) - k - 1 :]) + filling(k + 1, 1))
    for j in range(1, min(bins, count) + 1):
        apart = -(-(sum(heavy[:j]) + filling(j, j)) // j)
        together = heavy[j - 2] + heavy[j - 1] + filling(2, 1) if j > 1 else apart
        bounds.append(min(apart, together))
    return max(bounds)


def padded_totals() -> None:
    values, bins = np.array([3, 5, 4, 2]), np.array([2, 0, 2, 2])
    assert bin_totals(values, bins, 4, padded=True).tolist() == [5, 0, 12, 0]
    assert bin_totals(values, bins, 4, padded=False).tolist() == [5, 0, 9, 0]


@pytest.mark.parametrize(
    ("items", "bins", "runs"), [(7, 3, [0, 0, 0, 1, 1, 2, 2]), (2, 4, [0, 2]), (1, 1, [0]), (0, 2, [])]
)
def test_runs_in_digits(items: int, bins: int, runs: list[int]) -> None:
    assert in_runs(items, bins).tolist() == runs


@settings(max_examples=20)
@given(st.lists(st.integers(1, 99), max_size=12), st.integers(1, 4))
def test_a_search_without_a_budget_is_its_seed(loads: list[int], bins: int) -> None:
    given_loads = np.array(loads, np.int64)
    assert searched(given_loads, bins, looks=0).tolist() == longest_first(given_loads, bins).tolist()
    assert searched(given_loads, bins).tolist() == searched(
        given_loads, bins, seed=longest_first, looks=search_budget(len(loads))
    ).tolist()  # fmt: skip


@pytest.mark.parametrize(("excess", "found"), [(1, 65_537), (2, 65_536)])
def test_a_search_ends_where_it_is_close_enough(excess: int, found: int) -> None:
    """At 65,537, which is 2^-16 above the bound, though a swap leads to the bound; not at 65,538."""
    loads = np.array([60_000 + excess, 60_000, 5_536, 5_536 - excess])
    assert lower_bound(loads, 2) == 65_536

    def seed(loads: I64, num_bins: int, capacity: int | None = None, budget: BinBudget | None = None) -> I64:
        return np.array([0, 1, 0, 1])

    assert np.bincount(searched(loads, 2, seed=seed), loads).max() == found


@pytest.mark.parametrize(
    ("loads", "bins", "capacity", "expected"),
    [
        ([5, 1, 5, 1], 2, None, [0, 1, 0, 1]),
        ([1, 9, 1, 1, 1], 2, None, [1, 0, 1, 1, 1]),
        ([0, 0, 0], 2, 2, [0, 0, 1]),
        ([2, 2, 2], 3, None, [0, 1, 2]),
        ([], 2, None, []),
    ],
)
def test_padded_batches_in_digits(loads: list[int], bins: int, capacity: int | None, expected: list[int]) -> None:
    assert padded(np.array(loads, np.int64), bins, capacity).tolist() == expected


def test_padded_needs_that_contradict_their_loads_are_named() -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        padded(np.array([4, 6, 8, 6, 3, 2]), 2, None, budget([3, 5, 4, 4, 1, 2], 10))
    assert str(refusal.value) == (
        "item 2 has load 8 and needs 4 of memory, item 1 has load 6 and needs 5: of padded items the one with more "
        "load must not need less; take both from the items' sizes"
    )


def test_padded_batches_that_fit_no_memory() -> None:
    with pytest.raises(BinBudgetError) as refusal:
        padded(np.array([4, 4, 4]), 2, None, budget([4, 4, 4], 7))
    assert str(refusal.value) == (
        "3 padded items need 8 of memory in one of 2 bins however they are arranged, but a bin has 7; raise the number "
        "of bins or their memory"
    )
    assert padded(np.array([4, 4, 4]), 2, None, budget([4, 4, 4], 8)).tolist() == [0, 0, 1]


def test_memory_that_no_way_was_found_for() -> None:
    with pytest.raises(BinBudgetError) as refusal:
        longest_first(np.array([1, 1, 1]), 2, None, budget([3, 3, 3], 5))
    assert str(refusal.value) == (
        "found no way to place 3 items within the memory of 2 bins of 5: one of them would need 6; raise the number of "
        "bins or their memory"
    )


@pytest.mark.parametrize("name", sorted(BALANCERS))
def test_every_balancer_checks_what_it_gets(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape("3 items do not fit 1 bins of 2")):
        BALANCERS[name](np.array([1, 2, 3]), 1, 2)


# --- assignment -----------------------------------------------------------------------------------------------------


def test_traffic_at_its_limits() -> None:
    one, node = np.ones((2, 2), np.int64), np.array([0, 1])
    half = np.array([[2**60, 0], [0, 2**60]])
    assert fewest_bytes(half, node, node).tolist() == [0, 1]
    assert fewest_bytes(half[::-1].copy(), node, node).tolist() == [1, 0]
    for traffic, low, high in (
        (half + one, 1, 2**60 + 1),
        (np.array([[2**60, 1], [0, 2**60]]), 0, 2**60),
        (np.array([[2**60 + 1, 0], [0, 0]]), 0, 2**60 + 1),
        (one - 2, -1, -1),
    ):
        with pytest.raises(ValueError) as refusal:  # noqa: PT011
            fewest_bytes(traffic, node, node)
        assert str(refusal.value) == (
            f"traffic from {low} to {high} bytes between (2, 2) batches; it must not be negative, and "
            "its sum at most 2^61"
        )
    assert fewest_bytes(np.empty((0, 2), np.int64), np.empty(0, np.int64), node).tolist() == [0, 1]


def test_the_assignment_waits_its_turn_every_sixteen_batches() -> None:
    """33 batches, each of whose bytes lie on the node of another one: all of them move."""
    node = np.arange(33)
    traffic = np.roll(np.eye(33, dtype=np.int64) * 7, 1, axis=0)
    assert fewest_bytes(traffic, node, node).tolist() == [*range(1, 33), 0]


def test_peaks_in_digits() -> None:
    node = np.array([0, 0, 1])
    traffic = np.array([[1, 2, 4], [8, 16, 32], [64, 128, 256]])
    stay = np.arange(3)
    assert bytes_between_nodes(traffic, node, node, stay) == 4 + 32 + 64 + 128
    assert peak_between_nodes(traffic, node, node, stay) == 64 + 128
    assert peak_between_nodes(traffic, node, node, np.array([2, 1, 0])) == max(1 + 8 + 128 * 0, 128 + 256, 1 + 8)
    assert peak_between_nodes(traffic, np.zeros(3, np.int64), np.zeros(3, np.int64), stay) == 0
    assert lower_peaks(stay, [], node, 0).tolist() == [0, 1, 2]
    assert lower_peaks(np.array([2, 0, 1]), [(traffic, node)], node, 0).tolist() == [2, 0, 1]


def test_only_swaps_with_the_heaviest_node_of_a_hop_are_looked_at() -> None:
    is_peak = interpreted("kernels.peaks")._is_peak
    heaviest = np.array([[4, 0, 1], [2, 4, -1]])
    assert [node for node in range(5) if is_peak(heaviest, node)] == [2, 4]
    assert not is_peak(heaviest[:0], 0)
