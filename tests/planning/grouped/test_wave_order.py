"""The order of microbatches beside encoders and generators, against all orders."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.grouped.wave_order import algorithm_2, chain, searched_order
from dataserver.planning.simulation import OrderScorer, OrderTimes, Pipeline
from dataserver.planning.waves import one_f_one_b_in_flight


def random_chain(seed: int, num_stages: int, count: int, extra: int = 0) -> Pipeline:
    rng = np.random.Generator(np.random.PCG64(seed))
    times = [(rng.integers(1, 100, count), rng.integers(1, 200, count)) for _ in range(num_stages)]
    return chain(times, one_f_one_b_in_flight(num_stages, extra))


def makespan(pipeline: Pipeline, order: list[int]) -> int:
    return int(OrderScorer.of(pipeline).makespans(OrderTimes.of(pipeline), np.array([order]))[0])


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
