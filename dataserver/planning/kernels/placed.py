"""Compiled loops over items that have places."""

import numpy as np

from dataserver.planning.kernels import kernel
from dataserver.planning.samples import I64


def order_of_places(place: I64) -> I64:
    """The stable order of items by place, int64 [k]: counted, so that it takes a fifth of the time of a sort.

    Args:
        place: int64 [k], small non-negative numbers: there is memory for as many.
    """
    order = np.empty_like(place)
    _order(place, np.zeros(int(place.max(initial=-1)) + 2, np.int64), order)
    return order


def rows_before(rank: I64, microbatch: I64, rows: I64) -> I64:
    """Sum of the rows before each item among those of its rank's microbatch, which stand together. int64 [k]."""
    before = np.empty_like(rows)
    _rows_before(rank, microbatch, rows, before)
    return before


@kernel
def _order(place: I64, following: I64, order: I64) -> None:
    """`following`: zeros, one for each place and one more."""
    for i in range(len(place)):
        following[place[i] + 1] += 1
    for p in range(len(following) - 1):
        following[p + 1] += following[p]
    for i in range(len(place)):
        order[following[place[i]]] = i
        following[place[i]] += 1


@kernel
def _rows_before(rank: I64, microbatch: I64, rows: I64, before: I64) -> None:
    so_far = 0
    for i in range(len(rows)):
        if i > 0 and (rank[i] != rank[i - 1] or microbatch[i] != microbatch[i - 1]):
            so_far = 0
        before[i] = so_far
        so_far += rows[i]
