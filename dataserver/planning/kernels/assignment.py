"""Optimal assignment of rows to columns that hold several rows each."""

import numpy as np

from dataserver.planning.kernels import kernel, part
from dataserver.planning.samples import I64, Bool

_FAR = np.iinfo(np.int64).max


@kernel
def assign(cost: I64, capacity: I64) -> I64:
    """The column of each row with the least total cost, at most capacity[c] rows in column c.

    The Hungarian method by shortest augmenting paths with potentials (Kuhn 1955; Jonker and Volgenant 1987), where a
    column stays free until it is full, so that equal columns need not be told apart. Adds the rows one by one;
    O(rows^2 columns).

    Args:
        cost: int64 [rows, columns].
        capacity: int64 [columns], sum at least rows.

    Returns:
        int64 [rows].
    """
    rows, columns = cost.shape
    column_of = np.empty(rows, np.int64)
    column_of[:] = -1
    # cost[r, c] - row_price[r] - column_price[c] is never below 0 in rows that have a column, and 0 in that column.
    # held[c]: rows of column c.
    row_price, column_price, held = np.zeros(rows, np.int64), np.zeros(columns, np.int64), np.zeros(columns, np.int64)
    # tree[:size]: the rows reached from the added one; distance[c]: the least of these differences over the tree, from
    # row via[c] (finite after the first scan).
    tree, distance, reached = np.empty(rows, np.int64), np.empty(columns, np.int64), np.empty(columns, np.bool_)
    via = np.empty(columns, np.int64)
    for added in range(rows):
        distance[:] = _FAR
        reached[:] = False
        tree[0], size, scanned = added, 1, 0
        while True:
            for row in tree[scanned:size]:
                _scan(cost[row], row, row_price[row], column_price, reached, distance, via)
            scanned = size
            column = _closest(distance, reached)
            for row in tree[:size]:
                row_price[row] += distance[column]
            _reprice(distance[column], column_price, reached, distance)
            reached[column] = True
            if held[column] < capacity[column]:
                break
            for row in range(added):
                if column_of[row] == column:
                    tree[size] = row
                    size += 1
        held[column] += 1
        while column >= 0:  # back along the path; the row that is added had no column
            row = via[column]
            column, column_of[row] = column_of[row], column
    return column_of


@part
def _scan(cost: I64, row: int, row_price: int, column_price: I64, reached: Bool, distance: I64, via: I64) -> None:
    for column in range(len(cost)):
        slack = cost[column] - row_price - column_price[column]
        if not reached[column] and slack < distance[column]:
            distance[column], via[column] = slack, row


@part
def _closest(distance: I64, reached: Bool) -> int:
    closest = -1
    for column in range(len(distance)):
        if not reached[column] and (closest < 0 or distance[column] < distance[closest]):
            closest = column
    return closest


@part
def _reprice(step: int, column_price: I64, reached: Bool, distance: I64) -> None:
    for column in range(len(distance)):
        if reached[column]:
            column_price[column] -= step
        else:
            distance[column] -= step
