"""Kernels over the images of samples, one by one."""

import numpy as np

from dataserver.planning import I32, I64
from dataserver.planning.kernels.compiler import kernel


def grids(widths: I32 | I64, heights: I32 | I64, block: int, limit: int) -> tuple[I32, I32]:
    """Rows and columns of merge blocks of each image, int32 [m] each; see `sizing.patch_grids`.

    Args:
        widths: pixels, positive.
        heights: pixels, positive.
        block: pixels of a merge block's side.
        limit: blocks of an image.
    """
    rows, columns = np.empty(len(widths), np.int32), np.empty(len(widths), np.int32)
    _grids(widths, heights, block, limit, 1 << limit.bit_length() - 1, rows, columns)
    return rows, columns


def image_tokens(offsets: I64, rows: I32, columns: I32, merged: int, extra: int) -> I64:
    """Backbone tokens of the images of each sample, int64 [n].

    Args:
        offsets: int64 [n + 1], first image of each sample.
        rows: int32 [m], rows of the image's patch grid.
        columns: int32 [m], its columns.
        merged: patches that make up a token.
        extra: tokens beside those of each image.
    """
    tokens = np.empty(len(offsets) - 1, np.int64)
    _image_tokens(offsets, rows, columns, merged, extra, tokens)
    return tokens


@kernel
def _grids(widths: I32 | I64, heights: I32 | I64, block: int, limit: int, bit: int, rows: I32, columns: I32) -> None:
    """Fill in `rows` and `columns`; `bit` is the highest one of `limit`."""
    for i in range(len(widths)):
        width, height = widths[i], heights[i]
        down, across = max(1, (2 * height + block) // (2 * block)), max(1, (2 * width + block) // (2 * block))
        if down * across > limit:
            square, root, step = limit * height // width, 0, bit
            while step > 0:  # the integer square root, at most the limit, bit by bit; branches would be taken at random
                more = root + step
                root += step * (more <= limit) * (more * more <= square)
                step >>= 1
            down = max(1, root)
            across = max(1, min(limit // down, (2 * down * width + height) // (2 * height)))
            down = min(limit // across, down)
        rows[i], columns[i] = down, across


@kernel
def _image_tokens(offsets: I64, rows: I32, columns: I32, merged: int, extra: int, tokens: I64) -> None:
    """Fill in `tokens`."""
    for sample in range(len(tokens)):
        count = 0
        for image in range(offsets[sample], offsets[sample + 1]):
            count += rows[image] * columns[image] // merged + extra
        tokens[sample] = count
