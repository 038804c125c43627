"""Attention windows of an image encoder: squares of merge-blocks, side by side from an image's first corner."""

import numpy as np
from numpy.typing import NDArray


def window_order(grid: list[tuple[int, int]], merge: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The patches of packed images, window by window; an image's last windows are smaller where they do not fit.

    Args:
        grid: rows and columns in patches of each image, multiples of `merge`.
        merge: side of a block in patches.
        side: of a window in blocks.

    Returns:
        int64 [P], the patch at each position of the new order, and int64 [windows + 1], where each window begins.
    """
    order, lengths, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for rows, columns in grid:
        row, column = np.divmod(np.arange(rows * columns // merge**2), columns // merge)
        window = row // side * -(-(columns // merge) // side) + column // side
        order.append(first + np.argsort(window, kind="stable"))
        lengths.append(np.bincount(window))
        first += len(window)
    patches = np.concatenate(order)[:, None] * merge**2 + np.arange(merge**2)
    ends = np.cumsum(np.concatenate(lengths)) * merge**2
    return patches.reshape(-1), np.concatenate([np.zeros(1, np.int64), ends])
