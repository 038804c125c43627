"""Kicks of the search over bins, and DistTrain's Algorithm 2, in plain Python against what is written about them."""

import numpy as np
import pytest
from planning.kernels.interpreted import interpreted

from dataserver.planning import I64

search, ordering = interpreted("kernels.search"), interpreted("kernels.ordering")


def kicked(loads: I64, memory: I64, bins: list[list[int]], number: int, cap: int) -> list[list[int]]:
    """Twice an item of one bin changes places with one of another: the heaviest bin's first, then any's."""
    bins = [list(members) for members in bins]
    for which in range(2):
        lightest_first = sorted(range(len(bins)), key=lambda b: loads[bins[b]].sum())
        word = (2 * number + which) * 2654435761 % 2**32
        left = lightest_first[-1] if which == 0 else lightest_first[word % len(bins)]
        right = lightest_first[(word >> 8) % max(len(bins) - 1, 1)]
        if left == right or not bins[left] or not bins[right]:
            continue
        heaviest_first = [sorted(bins[b], key=lambda item: -loads[item]) for b in (left, right)]
        give = heaviest_first[0][(word >> 16) % len(bins[left])]
        take = heaviest_first[1][(word >> 20) % len(bins[right])]
        kept = [[item for item in bins[left] if item != give] + [take]]
        kept.append([item for item in bins[right] if item != take] + [give])
        if all(memory[members].sum() <= cap for members in kept):
            bins[left], bins[right] = kept
    return bins


@pytest.mark.parametrize("num_bins", [1, 2, 3, 5])
def test_a_kick_swaps_what_its_number_says(num_bins: int) -> None:
    outcomes = set()
    for number in range(1, 120):
        random = np.random.default_rng([number, num_bins])
        loads, memory = random.permutation(3 ** np.arange(9)), random.integers(0, 6, 9)
        seed = random.integers(0, num_bins, 9)
        if number % 7 == 0:
            seed[seed == 0] = num_bins - 1  # one bin is empty
        cap = max(memory[seed == b].sum() for b in range(num_bins)) + number % 3
        items = search.Items(loads, memory, np.argsort(-loads, kind="stable"))
        bins = search._bins(9, num_bins)
        search._lay_out(items, seed, bins, 9)
        search._fill(items, seed, bins)
        search._kick(items, bins, number, cap)
        before = [np.flatnonzero(seed == b).tolist() for b in range(num_bins)]
        expected = kicked(loads, memory, before, number, cap)
        assert [np.flatnonzero(bins.of == b).tolist() for b in range(num_bins)] == [sorted(m) for m in expected]
        assert bins.load.tolist() == [loads[members].sum() for members in expected]
        assert bins.ranked.tolist() == sorted(range(num_bins), key=lambda b: (bins.load[b], b))
        outcomes.add(sum(set(a) != set(b) for a, b in zip(before, expected, strict=True)))
    assert outcomes == {1: {0}, 2: {0, 2}, 3: {0, 2, 3}, 5: {0, 2, 3, 4}}[num_bins]


def ordered(forward: I64, backward: I64, ascending: list[int]) -> list[int]:
    """The smallest first, the p - 1 next smallest last, each other where the first stage waits about as long."""
    stages, count = forward.shape
    if count <= stages or stages == 1:
        return ascending
    order, last, middle = ascending[:1], ascending[1:stages], sorted(ascending[stages:])
    first_interval = int((forward + backward)[1:, order[0]].sum())
    for place in range(1, count - stages + 1):
        if place < stages:
            wanted = (first_interval - int(forward[0, order[1:]].sum())) // (stages - place)
        else:
            follows = order[place - stages + 1]
            wanted = max(0, int((forward + backward)[1:, follows].max())) - int(backward[0, follows])
        middle.remove(best := min(middle, key=lambda m: (abs(forward[0, m] - wanted), m)))
        order.append(best)
    return order + last


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_microbatches_fill_the_intervals_in_which_the_first_stage_waits(stages: int) -> None:
    found = set()
    for number in range(60):
        random = np.random.default_rng([number, stages])
        ranks, count = number % 4 + 1, number % 9 + 1
        forward, backward = random.integers(0, 40, (2, ranks, stages, count))
        ascending = np.argsort(forward.sum(axis=1), axis=1, kind="stable")
        orders = ordering.disttrain_orders(forward, backward, ascending)
        for rank, order in enumerate(orders.tolist()):
            assert order == ordered(forward[rank], backward[rank], ascending[rank].tolist())
            found.add(order == ascending[rank].tolist())
    assert found == ({True} if stages == 1 else {True, False})
