"""Optimal assignment of rows to columns that hold several rows each."""

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.kernels.compiler import kernel, part

_FAR = np.iinfo(np.int64).max


def assign(cost: I64, capacity: I64, column_of: I64, row_price: I64, column_price: I64, held: I64, most: int) -> None:
    """The column of each row with the least total cost, at most capacity[c] rows in column c.

    The Hungarian method by shortest augmenting paths with potentials (Kuhn 1955; Jonker and Volgenant 1987), where a
    column stays free until it is full, so that equal columns need not be told apart. Adds the rows one by one, `most`
    of them in this call; O(rows^2 columns) in all. What is changed in place is the state between calls:
    cost[r, c] - row_price[r] - column_price[c] is never below 0 in rows that have a column, and 0 in that column.

    Args:
        cost: int64 [rows, columns].
        capacity: int64 [columns], sum at least rows.
        column_of: int64 [rows], changed in place: the column of each row; -1 for rows that were not added yet, from the
            first on.
        row_price: int64 [rows], changed in place, zeros at first.
        column_price: int64 [columns], changed in place, zeros at first.
        held: int64 [columns], changed in place, zeros at first: rows of each column.
        most: rows to add.
    """
    rows, columns = cost.shape
    distance, via = np.empty((2, columns), np.int64)
    tree, reached = np.empty(rows, np.int64), np.empty(columns, np.bool_)
    _assign(cost, capacity, column_of, row_price, column_price, held, most, tree, distance, via, reached)


@kernel
def _assign(
    cost: I64,
    capacity: I64,
    column_of: I64,
    row_price: I64,
    column_price: I64,
    held: I64,
    most: int,
    tree: I64,
    distance: I64,
    via: I64,
    reached: Bool,
) -> None:
    rows, first = len(cost), 0
    for rows_held in held:
        first += rows_held
    # tree[:size]: the rows reached from the added one; distance[c]: the least of these differences over the tree, from
    # row via[c] (finite after the first scan).
    for added in range(first, min(first + most, rows)):
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
