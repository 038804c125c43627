from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.simulation.chains import chain, run

from dataserver.planning import yielding_to
from dataserver.planning.simulation import disttrain_order, disttrain_orders, orders

STAGES, MICROBATCHES = 4, 16


@given(st.integers(1, 6), st.integers(1, 14), st.data())
def test_smallest_first_next_smallest_last(stages: int, count: int, data) -> None:  # type: ignore[no-untyped-def]
    times = st.lists(st.integers(0, 30), min_size=count, max_size=count)
    forward = [np.array(data.draw(times)) for _ in range(stages)]
    backward = [np.array(data.draw(times)) for _ in range(stages)]
    order = disttrain_order(forward, backward)
    assert sorted(order) == list(range(count))
    assert order == disttrain_order(forward, backward)
    ascending = sorted(range(count), key=lambda m: (sum(int(f[m]) for f in forward), m))
    assert order[0] == ascending[0]
    if count > stages > 1:
        assert order[count - stages + 1 :] == ascending[1:stages]
    else:
        assert order == ascending


def test_equal_microbatches_keep_their_ties_in_order() -> None:
    same = [np.array([5] * 6)] * 3
    assert disttrain_order(same, same) == [0, 3, 4, 5, 1, 2]


def test_intervals_are_filled_by_the_closest_fit() -> None:
    # Two stages, the second takes 10 forward and 10 backward. Smallest first: 3 (1), next smallest last: 0 (2).
    # While microbatch 3 is on stage 1 (20), the closest is 4 (19). While 4 is (20, less its backward 9 here: 11), the
    # closest is 1 (12). While 1 is (20 - 5 = 15), the closest is 5 (14), and 2 (7) remains.
    first = np.array([2, 12, 7, 1, 19, 14])
    backward = np.array([1, 5, 3, 0, 9, 7])
    second = np.array([10] * 6)
    assert disttrain_order([first, second], [backward, second]) == [3, 4, 1, 5, 2, 0]


def lognormal(words: np.ndarray, mean: int) -> list[int]:
    """Encoder times of a log-normal with coefficient of variation 1 (sigma^2 = ln 2), scaled to the mean."""
    times = np.exp(words * np.sqrt(np.log(2)))
    return (times * mean / times.mean()).astype(np.int64).tolist()


def makespan(encoder: list[int], order: list[int]) -> int:
    first = [encoder[m] for m in order]
    forward = [first] + [[1000] * MICROBATCHES] * (STAGES - 1)
    backward = [[2 * t for t in stage] for stage in forward]
    return run(*chain(forward, backward)).makespan_ns


def test_on_average_faster_than_random_order() -> None:
    """The case of the reference's table: 4 stages, 16 microbatches, the encoder in front with CV 1."""
    rng = np.random.default_rng(5)
    ours = by_chance = faster = 0
    for _ in range(50):
        encoder = lognormal(rng.standard_normal(MICROBATCHES), mean=900)
        order = disttrain_order(
            [np.array(encoder)] + [np.array([1000] * MICROBATCHES)] * (STAGES - 1),
            [2 * np.array(encoder)] + [np.array([2000] * MICROBATCHES)] * (STAGES - 1),
        )
        times = [makespan(encoder, rng.permutation(MICROBATCHES).tolist()) for _ in range(4)]
        ours += 4 * makespan(encoder, order)
        by_chance += sum(times)
        faster += sum(makespan(encoder, order) <= t for t in times)
    assert ours < by_chance
    assert faster > 100, f"only {faster} of 200 random orders are no faster"


@pytest.mark.parametrize(("looks", "pauses"), [(1, 5), (2 * 81, 3), (1 << 23, 1)])
def test_many_ranks_are_ordered_in_pieces(monkeypatch: pytest.MonkeyPatch, looks: int, pauses: int) -> None:
    monkeypatch.setattr(orders, "_LOOKS", looks)
    forward, backward = np.random.default_rng(3).integers(0, 40, (2, 5, 3, 9))
    counted: list[None] = []
    with yielding_to(partial(counted.append, None)):
        found = disttrain_orders(forward, backward)
    assert found.tolist() == [disttrain_order(list(f), list(b)) for f, b in zip(forward, backward, strict=True)]
    assert len(counted) == pauses
    assert disttrain_orders(forward[:0], backward[:0]).shape == (0, 9)
