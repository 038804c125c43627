from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest
from builders.jobs import BALANCES
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning import yielding_to
from dataserver.planning.balancing import in_runs, longest_first, longest_first_of_each
from dataserver.planning.costs.model import backward_ns, forward_ns
from dataserver.planning.job.fields import BalancePolicy, Cost
from dataserver.planning.layouts.pipelined import placing
from dataserver.planning.layouts.pipelined.placing import PlacementProblem
from dataserver.planning.stream.packing import number_by_first, number_by_first_of_each


def heaviest(loads: list[int], bins: list[int] | tuple[int, ...], num_bins: int) -> int:
    return max(sum(load for load, b in zip(loads, bins, strict=True) if b == k) for k in range(num_bins))


def optimum(loads: list[int], num_bins: int) -> int:
    return min(heaviest(loads, choice, num_bins) for choice in product(range(num_bins), repeat=len(loads)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=7), st.integers(1, 3))
def test_within_grahams_bound_of_the_optimum(loads: list[int], num_bins: int) -> None:
    found = heaviest(loads, longest_first(np.array(loads, np.int64), num_bins).tolist(), num_bins)
    assert optimum(loads, num_bins) <= found <= (Fraction(4, 3) - Fraction(1, 3 * num_bins)) * optimum(loads, num_bins)


def test_grahams_tight_instance() -> None:
    loads = [3, 3, 2, 2, 2]
    assert heaviest(loads, longest_first(np.array(loads), 2).tolist(), 2) == 7
    assert optimum(loads, 2) == 6


@given(st.lists(st.integers(0, 10**15), max_size=40), st.integers(1, 8), st.integers(0, 3))
def test_equal_counts_with_a_cap(loads: list[int], num_bins: int, spare: int) -> None:
    capacity = -(-len(loads) // num_bins) + spare
    bins = longest_first(np.array(loads, np.int64), num_bins, capacity)
    counts = np.bincount(bins, minlength=num_bins)
    assert len(bins) == len(loads)
    assert len(counts) == num_bins
    assert (counts <= capacity).all()
    if spare == 0 and len(loads) % num_bins == 0:
        assert set(counts.tolist()) == {capacity}


def test_items_that_cannot_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="7 items do not fit 2 bins of 3"):
        longest_first(np.ones(7, np.int64), 2, 3)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=40), st.integers(1, 5))
def test_owners_have_what_they_would_have_alone(items: list[tuple[int, int]], num_bins: int) -> None:
    loads, owner = np.array(items, np.int64).reshape(-1, 2).T
    bins = longest_first_of_each(loads, owner, 4, num_bins, len(items) + 1)
    numbers = number_by_first_of_each(bins, owner, 4, num_bins)
    for mine in (owner == n for n in range(4)):
        assert bins[mine].tolist() == longest_first(loads[mine], num_bins, len(items) + 1).tolist()
        assert numbers[mine].tolist() == number_by_first(bins[mine]).tolist()


def test_an_owner_with_too_many_items_is_named() -> None:
    with pytest.raises(ValueError, match="3 items do not fit 1 bins of 2"):
        longest_first_of_each(np.ones(4, np.int64), np.array([1, 0, 1, 1]), 2, 1, 2)


@given(st.permutations([200, 400, 600, 800, 1000] * 8))
def test_veomnis_check(lengths: list[int]) -> None:
    """VeOmni's own ground truth: 8 ranks of {200..1000}, shuffled, must come out with equal sums of squares."""
    loads = np.array(lengths, np.int64) ** 2
    bins = longest_first(loads, 8)
    assert [int(loads[bins == b].sum()) for b in range(8)] == [2_200_000] * 8


def test_ties_go_to_the_lower_item_and_the_lower_bin() -> None:
    assert longest_first(np.array([5, 5, 5, 5, 5]), 3).tolist() == [0, 1, 2, 0, 1]
    assert longest_first(np.array([1, 9, 1]), 2).tolist() == [1, 0, 1]
    assert longest_first(np.zeros(4, np.int64), 2, 2).tolist() == [0, 0, 1, 1]


@given(st.integers(0, 50), st.integers(1, 9))
def test_runs_are_consecutive_and_even(num_items: int, num_bins: int) -> None:
    bins = in_runs(num_items, num_bins).tolist()
    assert bins == sorted(bins)
    counts = [bins.count(b) for b in range(num_bins)]
    assert sum(counts) == num_items
    assert max(counts) - min(counts) <= 1


@given(st.sampled_from(BALANCES), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.data())
def test_places_are_distinct_slots(policy: BalancePolicy, dp: int, waves: int, microbatch: int, data) -> None:  # type: ignore[no-untyped-def]
    loads = data.draw(st.lists(st.integers(0, 1000), max_size=dp * waves * microbatch))
    own = np.array([[*loads, 0]], np.int64)
    problem = PlacementProblem(
        dp=dp,
        num_waves=waves,
        slots=microbatch,
        components=1,
        num_stages=2,
        num_encoders=0,
        in_flight=np.array([2, 1]),
        own=own,
        way=own[:, :-1],
        base=np.zeros(1, np.int64),
        chunks=1,
        percent=np.full(1, 200),
    )
    paused: list[None] = []
    with yielding_to(partial(paused.append, None)):
        balanced = placing.balanced(problem, policy)
        stratified = placing.stratified(problem)
    assert len(paused) >= (4 if policy is BalancePolicy.NONE else 7)  # other jobs get their turns
    for placement in (balanced, placing.in_disttrain_order(problem, balanced), stratified):
        rank, wave, slot = placement.rank, placement.wave, placement.slot
        places = list(zip(rank.tolist(), wave.tolist(), slot.tolist(), strict=True))
        assert len(set(places)) == len(loads)
        assert all(0 <= r < dp and 0 <= w < waves and 0 <= s < microbatch for r, w, s in places)
        for r in range(dp):
            for w in range(waves):
                taken = sorted(s for rr, ww, s in places if (rr, ww) == (r, w))
                assert taken == list(range(len(taken)))


@given(st.integers(0, 2**22), st.integers(0, 10**11), st.integers(0, 10**8), st.integers(0, 1000))
def test_times_are_exact_to_rounding(size: int, linear: int, quadratic: int, backward: int) -> None:
    cost = Cost(linear_ps=linear, quadratic_fs=quadratic, backward_percent=backward)
    time = int(forward_ns(cost, np.array([size]))[0])
    exact = Fraction(size * linear, 1000) + Fraction(size * size * quadratic, 10**6)
    assert 0 <= exact - time < 3
    assert int(backward_ns(cost, np.array([time]))[0]) == time * backward // 100
