"""Pixels scaled to the patch grid, by one filter: a mean under a triangle that is two new pixels wide.

It is the antialiased bilinear filter of Pillow and torch, in integers of 8 and 16 bits, so that processors sum up many
pixels at a time, and all of them to the same bytes. Rounding both passes leaves it within 55 dB of Pillow's.
"""

import cv2
import numpy as np

from dataserver.preprocessing.codecs.patches import U8
from dataserver.preprocessing.codecs.scratch import scratch


def scaled(pixels: U8, size: tuple[int, int], goal: tuple[int, int]) -> U8:
    """Scale an image to its grid.

    Args:
        pixels: uint8 [height, width, 3], C-contiguous: the image at 1/1, 1/2, 1/4 or 1/8 of its size, rounded up.
        size: (width, height) of the image.
        goal: (width, height) of the grid.

    Returns:
        uint8 [goal[1], goal[0], 3], or `pixels` where they have that size already; the next call of this thread may
        overwrite it.
    """
    height, width, _ = pixels.shape
    if (width, height) == goal:
        return pixels
    reduced = next(s for s in (1, 2, 4, 8) if (-(-size[0] // s), -(-size[1] // s)) == (width, height))
    # Columns are scaled as rows of the transposed image: the pixels of a row lie in memory side by side.
    rows = _with_rows(pixels, 8 * size[1] // reduced, scratch("rows", (goal[1], width, 3)))
    lying = scratch("lying", (width, goal[1], 3))
    cv2.transpose(rows, lying)
    narrow = _with_rows(lying, 8 * size[0] // reduced, scratch("rows", (goal[0], goal[1], 3)))
    out = scratch("lying", (goal[1], goal[0], 3))
    cv2.transpose(narrow, out)
    return out


def _with_rows(pixels: U8, extent: int, out: U8) -> U8:
    """Scale uint8 [height, width, 3], whose image takes `extent` eighths of rows, to `out`, [new height, width, 3]."""
    from dataserver.preprocessing.kernels.scaling import scale_rows

    height, new_height = pixels.shape[0], out.shape[0]
    weights = np.empty(2 * -(-height // new_height) + 3, np.int64)
    taps, sums = np.empty(len(weights), np.uint16), np.empty(pixels[0].size, np.uint16)
    scale_rows(pixels.reshape(height, -1), extent, weights, taps, sums, out.reshape(new_height, -1))
    return out
