"""What balancers, packers, assignments and orders of microbatches come to on small inputs with many ties, pinned."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from planning.scattered import digest, numbers

from dataserver.planning import I64
from dataserver.planning.balancing import (
    BALANCERS,
    BinBudget,
    assignment,
    fewest_bytes,
    lower_peaks,
    searched,
)
from dataserver.planning.layouts.grouped.wave_order import chain
from dataserver.planning.simulation import OrderScorer, disttrain_order, simulate
from dataserver.planning.stream import packing


def outcome(call: Callable[[], I64]) -> list[int] | str:
    """The bins, or why there are none."""
    try:
        return [int(b) for b in call()]
    except ValueError as error:
        return str(error)


def balanced(seeds: range) -> Iterator[list[int] | str]:
    for seed in seeds:
        count, bins = seed % 29, 1 + seed % 7
        loads, need = numbers(seed, count, 0, (9, 60, 2_000)[seed % 3]), numbers(seed + 1, count, 0, 9)
        even = -(-count // bins)
        mean = -(-int(need.sum()) // bins)
        for name in sorted(BALANCERS):
            for capacity in (None, even, even + 1):
                yield outcome(partial(BALANCERS[name], loads, bins, capacity))
            for cap in (mean, mean + 1, mean + 3, 2 * mean + 9):
                yield outcome(partial(BALANCERS[name], loads, bins, (None, even)[seed % 2], BinBudget(need, cap)))
        for budget in (0, 1, 40, 300):
            yield outcome(partial(searched, loads, bins, even + 1, looks=budget))


def packed(seeds: range) -> Iterator[list[int] | str]:
    for seed in seeds:
        tokens = numbers(seed, seed % 31, 1, (12, 30)[seed % 2])
        for seq_len in (11, 12, 30, 37):
            yield outcome(partial(packing.best_fit_decreasing, tokens, seq_len))
            for more in (None, 0, 1, 4):
                count = None if more is None else -(-int(tokens.sum()) // seq_len) + more
                yield outcome(partial(packing.balanced, tokens, tokens + tokens**2, seq_len, count))


def test_golden_bins_of_balancers_and_packers() -> None:
    """Alone, under caps of items and of memory, and where these leave nothing."""
    assert digest([*balanced(range(1, 30)), *packed(range(1, 45))]) == "47e6627c76317e0c"


def test_golden_bins_of_more_items() -> None:
    loads = numbers(3, 400, 1, 10**6) ** 2 // 10**6
    found = [outcome(partial(BALANCERS[name], loads, 16, 40, BinBudget(loads % 50, 800))) for name in sorted(BALANCERS)]
    found += [outcome(partial(searched, loads, bins, None)) for bins in (3, 50, 150)]
    found += [outcome(partial(packing.balanced, 1 + loads % 300, loads, 1_024, more)) for more in (60, 64, 80)]
    assert digest(found) == "5552020a87a44409"


def relabelled(seed: int) -> Iterator[list[int] | str]:
    ranks, nodes = 1 + seed % 23, 1 + seed % 5
    node = numbers(seed, ranks, 0, nodes - 1) if seed % 2 else np.arange(ranks) * nodes // ranks
    traffic = numbers(seed + 1, ranks * ranks, 0, (3, 100)[seed % 2]).reshape(ranks, ranks)
    there = numbers(seed + 2, ranks, 0, nodes - 1)
    rank = fewest_bytes(traffic, there, node)
    yield rank.tolist()
    given = np.argsort(numbers(seed + 3, ranks, 0, 50), kind="stable")
    for transfers in ([(traffic, node)], [(traffic, there), (traffic.T, node)], [(traffic[:0], node[:0])]):
        between = sum(assignment.bytes_between_nodes(t, at, node, given) for t, at in transfers)
        for spare in (-1, 0, 5, 10**6):
            yield outcome(partial(lower_peaks, given, transfers, node, between + spare))
    yield outcome(partial(lower_peaks, given, [(traffic - 1, node)], node, 0))
    yield outcome(partial(fewest_bytes, traffic, there[1:], node))


def test_golden_ranks_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a budget that ends the search after one sweep, or after none."""
    found = [list(relabelled(seed)) for seed in range(40)]
    monkeypatch.setattr(assignment, "SWAPS_PER_BATCH", 0)
    for swaps in (0, 1, 60):
        monkeypatch.setattr(assignment, "SWAPS", swaps)
        found += [list(relabelled(seed)) for seed in range(20, 28)]
    assert digest(found) == "3a606ccdec30119b"


def test_golden_orders_of_algorithm_2() -> None:
    found = []
    for seed in range(90):
        stages, count = 1 + seed % 5, seed % 13
        times = numbers(seed, 2 * stages * count, 1, (4, 90)[seed % 2]).reshape(2, stages, count)
        order = disttrain_order(list(times[0]), list(times[1]))
        assert sorted(order) == list(range(count))
        found.append(order)
    assert digest(found) == "39e9acae7c01780d"


@pytest.mark.parametrize("transfers", [False, True])
def test_orders_scored_together_take_what_each_takes_alone(transfers: bool) -> None:
    """More orders than are swept at once, the last ones fewer; start and cause of every operation are pinned."""
    pinned = []
    for seed in range(8):
        stages, count = 1 + seed % 4, 1 + seed % 6
        times = numbers(seed, 2 * stages * count, 0, 50).reshape(stages, 2, count)
        held = np.arange(stages, 0, -1) + seed % 2
        pipeline = chain([(f, b) for f, b in times], held, numbers(seed + 1, stages - 1, 0, 40) if transfers else None)
        orders = np.argsort(numbers(seed + 2, 35 * count, 0, 9**9).reshape(35, count), axis=1, kind="stable")
        found = OrderScorer.of(pipeline).makespans(orders)
        alone = [
            simulate(replace(pipeline, forward_ns=pipeline.forward_ns[:, o], backward_ns=pipeline.backward_ns[:, o]))
            for o in orders
        ]
        assert found.tolist() == [timeline.makespan_ns for timeline in alone]
        pinned.append([(t.start_ns.tolist(), t.cause.tolist(), t.peak_bytes.tolist()) for t in alone[:3]])
    assert digest(pinned) == {False: "b3116d272b877af2", True: "8a53e5d2317c7b43"}[transfers]
