"""Scaling of images along one side."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.kernels import kernel

_ONE: Final = 256
"""Sum of the weights of a new row."""


@kernel
def scale_rows(
    pixels: NDArray[np.uint8], extent: int, weights: NDArray[np.int64], sums: NDArray[np.uint16], out: NDArray[np.uint8]
) -> None:
    """Make each new row as a weighted sum of old ones.

    In units of 1 / (16 * new rows) old rows all is exact: old row k lies at (2k + 1) * 8 * new rows, new row y at
    (2y + 1) * extent, and its triangle reaches 2 * max(extent, 8 * new rows) to both sides.

    Args:
        pixels: [old rows, bytes of a row].
        extent: eighths of old rows that the image takes; the last of them may reach beyond it.
        weights: room for those of one new row, [old rows under a triangle].
        sums: room for one row, [bytes of a row]; at most 255 * 256 + 128.
        out: [new rows, bytes of a row].
    """
    old, new = pixels.shape[0], out.shape[0]
    reach = 2 * max(extent, 8 * new)
    for y in range(new):
        centre = (2 * y + 1) * extent
        first = max(0, (centre - reach) // (16 * new))
        count = min(old - 1, (centre + reach) // (16 * new)) + 1 - first
        total = 0
        for k in range(count):
            weights[k] = max(0, reach - abs((2 * (first + k) + 1) * 8 * new - centre))
            total += weights[k]
        # Rounded as running sums, so that they sum to one exactly.
        running = before = 0
        for k in range(count):
            running += weights[k]
            rounded = (running * _ONE + total // 2) // total
            weights[k] = rounded - before
            before = rounded
        for x in range(sums.shape[0]):
            sums[x] = _ONE // 2
        for k in range(count):
            weight, row = weights[k], first + k
            if weight > 0:
                for x in range(sums.shape[0]):
                    sums[x] = np.uint16(sums[x] + weight * pixels[row, x])
        for x in range(sums.shape[0]):
            out[y, x] = sums[x] >> 8
