"""What the busiest rank does at least where images are not cut, and how near plans come to steps solved with it."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from orchestration.estimates import Case, estimates, tiles

from dataserver.planning.job.fields import Cost
from trainclient.layouts.pipelined.degrees import pipelined
from trainclient.orchestrate.whole_images import MOST_DRAWN, busiest_share_of, busiest_shares, drawn_items, item_cost
from trainclient.orchestrate.workload import Load

COST = Cost(linear_ps=1000, quadratic_fs=0, backward_percent=200)


def load(*sizes: tuple[float, int]) -> Load:
    rows = sum(n * rate for rate, n in sizes)
    return Load(sum(rate for rate, _ in sizes), rows, 0.0, max(n for _, n in sizes), sizes)


def test_images_of_one_size_are_divided_whole() -> None:
    """Seven images of one size, in one wave: the busiest of r ranks has ceil(7 / r)."""
    shares = busiest_shares(load((7, 64)), COST, 1, 1, 9)
    assert shares * 7 == pytest.approx([7, 4, 3, 2, 2, 2, 1, 1, 1])


def test_images_whose_cost_is_none_count_alike() -> None:
    """As measured where only the number of microbatches counts."""
    nothing = Cost(microbatch_ns=9, linear_ps=0, quadratic_fs=0, backward_percent=200)
    sizes, ranks = load((3, 16), (4, 64)), np.arange(1, 9)
    assert busiest_share_of(sizes, nothing, 1, ranks) == pytest.approx(busiest_share_of(load((7, 64)), COST, 1, ranks))
    assert np.isfinite(busiest_share_of(sizes, nothing, MOST_DRAWN, ranks)).all()


def test_ranks_even_out_over_two_waves() -> None:
    one, two, more = (busiest_shares(load((3, 64)), COST, waves, 1, 2)[1] for waves in (1, 2, 9))
    assert (one, two, more) == pytest.approx((2 / 3, 1 / 2, 1 / 2))


def test_no_division_of_the_images_beats_the_bound() -> None:
    """All divisions of drawn images between 1 to 4 ranks; with so few the bound is nearly reached."""
    sizes = load((3, 16), (2, 100), (1, 300))
    shares = busiest_shares(sizes, COST, 1, 1, 4)
    drawn = drawn_items(sizes, item_cost(COST), 6)
    for ranks in range(1, 5):
        owners = np.array(list(product(range(ranks), repeat=6)))
        loads = np.stack([(drawn[:, None] * (owners == r)).sum(axis=2) for r in range(ranks)])
        best = (loads.max(axis=0).min(axis=1) / drawn.sum(axis=1)).mean()
        assert 1 / ranks <= shares[ranks - 1] <= best + 1e-12
        assert shares[ranks - 1] > 0.95 * best
    assert (np.diff(shares) <= 0).all()


def test_shares_of_images_too_many_to_draw_are_those_of_drawn_ones() -> None:
    sizes, ranks = load((3, 60), (3, 100)), np.array([1, 7, 300, 5000, 7000, 12_000, 15_000, 20_000])
    drawn, expected = (busiest_share_of(sizes, COST, (MOST_DRAWN + n) / 6, ranks) for n in (0, 1))
    assert expected == pytest.approx(drawn, rel=0.02)
    assert ((expected * ranks)[4:] > 1.05).all()  # of two images that share a rank, and of the largest
    assert (np.diff(busiest_share_of(sizes, COST, 1e5, np.arange(1, 700_000, 37))) <= 0).all()


def test_a_batch_of_a_million_takes_as_long_as_any() -> None:
    """Neither images nor numbers of ranks become arrays as long as the batch: of 300 MB of 64-bit numbers or more."""
    problem = Case(tiles({1: 4, 5: 4, 13: 2}, 100), packed=True, gpus=16, batch=1_000_000).problem()
    tracemalloc.start()
    try:
        found = pipelined(problem)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found
    assert most < 20_000_000


def test_plans_are_near_what_is_solved() -> None:
    """With shares of 1 / ranks two of three plans take 19 and 29 percent longer than was solved."""
    case = Case(tiles({1: 4, 5: 4, 13: 2}, 100), packed=True, gpus=16, batch=32)
    ratios = [found.ratio for found in estimates(case, 1)]
    assert 0.95 <= min(ratios) <= max(ratios) <= 1.1, ratios
