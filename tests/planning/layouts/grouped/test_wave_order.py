"""The order of microbatches beside encoders and generators, against all orders."""

from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.layouts.grouped import wave_order
from dataserver.planning.layouts.grouped.wave_order import algorithm_2, chain, searched_order
from dataserver.planning.layouts.shared.waves import one_f_one_b_in_flight
from dataserver.planning.simulation import OrderScorer, Pipeline


def random_chain(seed: int, num_stages: int, count: int, extra: int = 0) -> Pipeline:
    rng = np.random.Generator(np.random.PCG64(seed))
    times = [(rng.integers(1, 100, count), rng.integers(1, 200, count)) for _ in range(num_stages)]
    return chain(times, one_f_one_b_in_flight(num_stages, extra))


def makespan(pipeline: Pipeline, order: list[int]) -> int:
    return int(OrderScorer.of(pipeline).makespans(np.array([order]))[0])


def test_neighbours_come_in_one_order_which_decides_between_equal_ones() -> None:
    assert wave_order._changes(3).tolist() == [
        *([1, 0, 2], [1, 0, 2]),  # 0 and 1 change places; 0 moves to 1
        *([2, 1, 0], [1, 2, 0]),
        *([1, 0, 2],),  # 1 moves to 0
        *([0, 2, 1], [0, 2, 1]),
        *([2, 0, 1],),
        *([0, 2, 1],),
    ]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 12), st.integers(0, 2))
def test_the_search_is_never_behind_what_it_starts_from(seed: int, num_stages: int, count: int, extra: int) -> None:
    pipeline = random_chain(seed, num_stages, count, extra)
    order = searched_order(pipeline)
    assert sorted(order) == list(range(count))
    assert order == searched_order(pipeline)
    assert makespan(pipeline, order) <= min(makespan(pipeline, o) for o in (list(range(count)), algorithm_2(pipeline)))


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_near_the_best_of_all_orders(seed: int) -> None:
    pipeline = random_chain(seed, 3, 6)
    best = min(makespan(pipeline, list(order)) for order in permutations(range(6)))
    assert makespan(pipeline, searched_order(pipeline)) <= 1.02 * best


def test_many_microbatches_take_the_better_of_the_two() -> None:
    pipeline = random_chain(1, 3, 200)
    order = searched_order(pipeline)
    assert makespan(pipeline, order) == min(makespan(pipeline, o) for o in (list(range(200)), algorithm_2(pipeline)))


def neighbours(order: list[int]) -> Iterator[list[int]]:
    """All exchanges of two microbatches, and moves of one, in the order in which they are looked at."""
    for a in range(len(order)):
        for b in range(len(order)):
            if a < b:
                yield [order[{a: b, b: a}.get(place, place)] for place in range(len(order))]
            if a != b:
                rest = order[:a] + order[a + 1 :]
                yield [*rest[:b], order[a], *rest[b:]]


def climbed(pipeline: Pipeline, most: int) -> list[int]:
    """The order that hill climbing comes to in as many whole rounds as `most` operations allow."""
    stages, count = pipeline.forward_ns.shape
    looks = most // (2 * stages * count)
    best = min((list(range(count)), algorithm_2(pipeline)), key=lambda order: makespan(pipeline, order))
    while count > 1 and looks >= len(near := list(neighbours(best))):
        looks -= len(near)
        found = min(near, key=lambda order: makespan(pipeline, order))
        if makespan(pipeline, found) >= makespan(pipeline, best):
            break
        best = found
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_search_takes_the_best_neighbour_as_often_as_its_operations_allow(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each budget at the operation that allows one more round."""
    stages, count = 2 + seed % 2, 4 + seed
    pipeline = random_chain(0, stages, count)
    a_round = 2 * stages * count * (3 * count * (count - 1) // 2)
    found = set()
    for most in (0, a_round - 1, a_round, 2 * a_round - 1, 2 * a_round, 3 * a_round - 1, 3 * a_round, 99 * a_round):
        monkeypatch.setattr(wave_order, "MAX_OPERATIONS", most)
        order = searched_order(pipeline)
        assert order == climbed(pipeline, most)
        found.add(makespan(pipeline, order))
    assert len(found) > 2, "several rounds help"


def test_one_microbatch_has_one_order() -> None:
    assert searched_order(random_chain(1, 3, 1)) == [0]
