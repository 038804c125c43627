"""Kernels over the images of samples, one by one."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I32, I64
from dataserver.planning.kernels.compiler import kernel, part

_HALVINGS: Final = 24
"""Steps of SigLIP 2's search: from 100 - 1e-6 they come below 1e-5."""
_MILLIONTHS: Final = 10**6
_LARGEST_SCALE: Final = 100


def grids(widths: I32 | I64, heights: I32 | I64, block: int, limit: int) -> tuple[I32, I32]:
    """Rows and columns of merge blocks of each image, int32 [m] each; see `grids.patch_grids`.

    Args:
        widths: pixels, positive.
        heights: pixels, positive.
        block: pixels of a merge block's side.
        limit: blocks of an image.
    """
    rows, columns = np.empty(len(widths), np.int32), np.empty(len(widths), np.int32)
    sides = widths.astype(np.int64), heights.astype(np.int64)  # as for warm-up, whatever those of an index are
    _grids(*sides, block, limit, 1 << limit.bit_length() - 1, rows, columns)
    return rows, columns


def qwen_grids(
    widths: I64, heights: I64, block: int, least: int, most: int, aspect: int
) -> tuple[I32, I32, NDArray[np.bool_]]:
    """Rows and columns of merge blocks of each image, int32 [m] each, as Qwen's processors round them.

    Args:
        widths, heights: pixels, positive; neither is more than `aspect` times the other.
        block: pixels of a merge block's side.
        least, most: pixels of an image.
        aspect: see there.

    Returns:
        Rows, columns, and bool [m]: whether one of them was a whole number before it was rounded down or up, which
        doubles may miss.
    """
    rows, columns = np.empty(len(widths), np.int32), np.empty(len(widths), np.int32)
    ties = np.empty(len(widths), np.bool_)
    bit = 1 << (aspect * (most // block**2 + 1)).bit_length() // 2
    _qwen_grids(widths, heights, block, least, most, bit, rows, columns, ties)
    return rows, columns, ties


def naflex_grids(widths: I64, heights: I64, patch: int, most: int) -> tuple[I32, I32]:
    """Rows and columns of patches of each image, int32 [m] each, by SigLIP 2's search of a scale.

    Args:
        widths, heights: pixels, positive.
        patch: pixels of a patch's side.
        most: patches of an image.
    """
    rows, columns = np.empty(len(widths), np.int32), np.empty(len(widths), np.int32)
    _naflex_grids(widths, heights, patch, most, rows, columns)
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
def _grids(widths: I64, heights: I64, block: int, limit: int, bit: int, rows: I32, columns: I32) -> None:
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
    """Fill in `tokens`, the tokens that the images of each sample take, int64 [samples]."""
    for sample in range(len(tokens)):
        count = 0
        for image in range(offsets[sample], offsets[sample + 1]):
            count += rows[image] * columns[image] // merged + extra
        tokens[sample] = count


@kernel
def _qwen_grids(
    widths: I64, heights: I64, block: int, least: int, most: int, bit: int, rows: I32, columns: I32, ties: Any
) -> None:
    """Fill in `rows`, `columns` and `ties`; no root that is taken reaches twice the power of two `bit`."""
    area = block * block
    for i in range(len(widths)):
        width, height = widths[i], heights[i]
        down, across = _half_even(height, block), _half_even(width, block)
        pixels, tie = down * across * area, False
        if pixels > most:
            down, tie_down = _root(height * most, width * area, bit)
            across, tie_across = _root(width * most, height * area, bit)
            tie = tie_down or tie_across
        elif pixels < least:
            down, tie_down = _root(height * least, width * area, bit)
            across, tie_across = _root(width * least, height * area, bit)
            tie = tie_down or tie_across
            down, across = down + (not tie_down), across + (not tie_across)
        rows[i], columns[i], ties[i] = max(1, down), max(1, across), tie


@part
def _half_even(side: int, block: int) -> int:
    """The number of blocks that is nearest to a side; of two, the even one."""
    number, rest = side // block, 2 * (side % block)
    return number + (rest > block or (rest == block and number % 2 == 1))


@part
def _root(numerator: int, denominator: int, bit: int) -> tuple[int, bool]:
    """The square root of a fraction, rounded down, and whether it was whole."""
    square, root, step = numerator // denominator, 0, bit
    while step > 0:
        more = root + step
        root += step * (more * more <= square)
        step >>= 1
    return root, root * root * denominator == numerator


@kernel
def _naflex_grids(widths: I64, heights: I64, patch: int, most: int, rows: I32, columns: I32) -> None:
    """Fill in `rows` and `columns`.

    Scales are counted in millionths, and parts of 2^24 of these: halving them is exact. The processor's own are
    doubles, which differ by less than 1e-13 of the steps in between.
    """
    one = 1 << _HALVINGS
    for i in range(len(widths)):
        width, height = widths[i], heights[i]
        low, high = one, _LARGEST_SCALE * _MILLIONTHS * one
        for _ in range(_HALVINGS):
            scale = (low + high) // 2
            down = _scaled_up(height, scale, patch, most)
            across = _scaled_up(width, scale, patch, most)
            if down * across <= most:
                low = scale
            else:
                high = scale
        down = min(most, _scaled_up(height, low, patch, most))
        rows[i], columns[i] = down, min(most // down, _scaled_up(width, low, patch, most))


@part
def _scaled_up(side: int, scale: int, patch: int, most: int) -> int:
    """The patches that cover a scaled side; one more than there may be, where it is too many."""
    whole, parts = scale >> _HALVINGS, scale & ((1 << _HALVINGS) - 1)
    pixels = side * whole + (side * parts >> _HALVINGS)
    rest = side * parts & ((1 << _HALVINGS) - 1)
    unit = patch * _MILLIONTHS
    return min(most + 1, pixels // unit + (pixels % unit > 0 or rest > 0))
