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
def test_places_begin_anew_with_each_rank_and_each_microbatch(module: Any, count: int) -> None:
    rng = np.random.default_rng(count)
    rank, microbatch, rows = (rng.integers(0, most, count) for most in (3, 4, 5))
    order = np.lexsort((microbatch, rank))
    found = module.in_places(order, rank, microbatch, rows)
    assert all(array.dtype == np.int64 for array in found)
    expected, before = [], dict[tuple[int, int], list[int]]()
    for item in order.tolist():
        at = int(rank[item]), int(microbatch[item])
        here = before.setdefault(at, [])
        expected.append((*at, len(here), sum(here)))
        here.append(int(rows[item]))
    assert list(zip(*(array.tolist() for array in found), strict=True)) == expected


@pytest.mark.parametrize("module", [placed, interpreted("placed")])
@pytest.mark.parametrize(("count", "given"), [(0, 3), (1, -1), (50, 3), (50, -1), (50, 0)])
def test_images_come_in_the_backbones_order_behind_those_of_other_modules(module: Any, count: int, given: int) -> None:
    rng = np.random.default_rng(count + given)
    at = sorted(zip(rng.integers(0, 3, count), rng.integers(0, 4, count), rng.permutation(count), strict=True))
    rank, microbatch, item = np.array(at, np.int64).reshape(-1, 3).T.copy()
    counts = rng.integers(0, 4, count)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows, columns = (2 * rng.integers(1, 9, (2, int(offsets[-1])))).astype(np.int32)
    first, end = offsets[:-1], offsets[1:] - rng.integers(0, 2, count) * (counts > 0)  # the last may be of another kind
    first = np.where(rng.random(count) < 0.7, first, end)
    mine = rng.random(count) < 0.6
    expected, so_far = [], dict[tuple[int, int], int]()
    ours = [image for sample in np.flatnonzero(mine) for image in range(first[sample], end[sample])]
    for r, m, sample in at:
        for image in range(first[sample], end[sample]):
            taken = given if given >= 0 else int(rows[image]) * int(columns[image]) // 4
            if mine[sample]:
                expected.append((image, ours.index(image), r, m, so_far.get((r, m), 0), taken))
            so_far[r, m] = so_far.get((r, m), 0) + taken
    beside = module.Beside(item, rank, microbatch, first, end, mine, rows, columns)
    found = module.images_of(beside, 4, given)
    assert all(array.dtype == np.int64 for array in found)
    assert list(zip(*(array.tolist() for array in found), strict=True)) == expected
    assert len(expected) >= count // 5
