"""Orders and sums of items that have places, compiled and as plain Python, against numpy and a loop."""

from typing import Any

import numpy as np
import pytest
from planning.kernels.interpreted import interpreted

from dataserver.planning.kernels import placed


@pytest.mark.parametrize("module", [placed, interpreted("placed")])
@pytest.mark.parametrize(("count", "places"), [(0, 1), (1, 1), (40, 1), (40, 7), (7, 65_536), (500, 300)])
def test_the_order_is_stable_and_by_place(module: Any, count: int, places: int) -> None:
    place = np.random.default_rng(count).integers(0, places, count)
    order = module.order_of_places(place)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(count), key=lambda item: place[item])


@pytest.mark.parametrize("module", [placed, interpreted("placed")])
@pytest.mark.parametrize("count", [0, 1, 60])
def test_rows_before_begin_anew_with_each_rank_and_each_microbatch(module: Any, count: int) -> None:
    rng = np.random.default_rng(count)
    at = np.array(sorted(zip(rng.integers(0, 3, count), rng.integers(0, 4, count), strict=True)), np.int64)
    rank, microbatch = at.reshape(-1, 2).T.copy()
    rows = rng.integers(0, 5, count)
    found = module.rows_before(rank, microbatch, rows)
    for i in range(count):
        same = (rank[:i] == rank[i]) & (microbatch[:i] == microbatch[i])
        assert found[i] == rows[:i][same].sum()
    assert len(found) == count
