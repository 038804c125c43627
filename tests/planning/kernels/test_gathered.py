"""Orders of draws, compiled and as plain Python, against numpy."""

from typing import Any

import numpy as np
import pytest
from planning.kernels.interpreted import interpreted

from dataserver.planning.kernels import gathered


@pytest.mark.parametrize("module", [gathered, interpreted("gathered")])
@pytest.mark.parametrize(("least", "most"), [(0, 1 << 64), (5 << 60, (5 << 60) + (1 << 52)), (1 << 63, (1 << 63) + 3)])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 700])
def test_draws_are_ordered_by_their_words(module: Any, count: int, least: int, most: int) -> None:
    words = np.random.default_rng(count).integers(least, most, count, dtype=np.uint64)
    order = module.order_of_draws(words)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))
    assert (words[order] == np.sort(words)).all()


@pytest.mark.parametrize("module", [gathered, interpreted("gathered")])
def test_draws_that_crowd_in_one_place_are_ordered_as_well(module: Any) -> None:
    words = np.append(np.arange(100, dtype=np.uint64)[::-1], np.uint64((1 << 64) - 1))
    assert module.order_of_draws(words).tolist() == [*range(99, -1, -1), 100]
