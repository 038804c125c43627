"""Scaling of images along one side."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.kernels import kernel

_ONE: Final = 256
"""Sum of the weights of a new row."""


@kernel
def scale_rows(
    pixels: NDArray[np.uint8],
    extent: int,
    weights: NDArray[np.int64],
    taps: NDArray[np.uint16],
    sums: NDArray[np.uint16],
    out: NDArray[np.uint8],
) -> None:
    """Make each new row as a weighted sum of old ones.

    In units of 1 / (16 * new rows) old rows all is exact: old row k lies at (2k + 1) * 8 * new rows, new row y at
    (2y + 1) * extent, and its triangle reaches 2 * max(extent, 8 * new rows) to both sides.

    Four old rows or fewer, which is what most new rows have, are summed up at once. Weights are read as 16 bits: only
    of factors that are no wider does the compiler know that it may multiply 16 bits at a time.

    Args:
        pixels: [old rows, bytes of a row].
        extent: eighths of old rows that the image takes; the last of them may reach beyond it.
        weights: room for those of one new row, [old rows under a triangle].
        taps: room for the same as shares of 256, at least [4].
        sums: room for one row, [bytes of a row]; at most 255 * 256 + 128.
        out: [new rows, bytes of a row].
    """
    old, new, width = pixels.shape[0], out.shape[0], out.shape[1]
    reach = 2 * max(extent, 8 * new)
    for y in range(new):
        centre = (2 * y + 1) * extent
        first = max(0, (centre - reach) // (16 * new))
        count = total = 0
        for row in range(first, min(old, (centre + reach) // (16 * new) + 1)):
            weight = reach - abs((2 * row + 1) * 8 * new - centre)
            if weight > 0:
                weights[count] = weight
                count += 1
                total += weight
            elif count == 0:
                first = row + 1
        # Rounded as running sums, so that they sum to one exactly.
        running = before = 0
        for k in range(count):
            running += weights[k]
            rounded = (running * _ONE + total // 2) // total
            taps[k] = rounded - before
            before = rounded
        for k in range(count, 4):
            taps[k] = 0
        if count <= 4:
            a, b, c, d = taps[0], taps[1], taps[2], taps[3]
            second, third, fourth = min(first + 1, old - 1), min(first + 2, old - 1), min(first + 3, old - 1)
            for x in range(width):
                near = a * pixels[first, x] + b * pixels[second, x]
                far = c * pixels[third, x] + d * pixels[fourth, x]
                out[y, x] = np.uint16(_ONE // 2 + near + far) >> 8
        else:
            for x in range(width):
                sums[x] = _ONE // 2
            for k in range(count):
                tap, row = taps[k], first + k
                for x in range(width):
                    sums[x] = np.uint16(sums[x] + tap * pixels[row, x])
            for x in range(width):
                out[y, x] = sums[x] >> 8
