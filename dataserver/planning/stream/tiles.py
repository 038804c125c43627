"""Tiles of images, by the arithmetic of released models' processors (transformers 5.24). All in integers.

The layout of an image is an int32 [6]: rows and columns of tiles, 0 where it is not cut; and, with `pinpoints`, rows
and columns of embeddings that are left of all tiles without borders, and those that are left of these where they are
more than the model takes. All parts of an image, its tiles and the picture of the whole, have one patch grid.
"""

from fractions import Fraction
from functools import lru_cache
from math import floor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I32, I64, Bool
from dataserver.planning.job.fields import Sizing, TileChoice, Tiles
from dataserver.planning.stream.doubles import as_double, root_as_double

LAYOUT: Final = 6
"""How many numbers say how an image is cut into tiles."""
_BITS: Final = 53
_POWERS: Final = np.left_shift(1, np.arange(63))


def tile_layouts(widths: I32 | I64, heights: I32 | I64, lone: Bool, side: int, cells: int, tiles: Tiles) -> I32:
    """The layouts of many images, int32 [m, 6].

    Args:
        widths, heights: [m], upright pixels, positive.
        lone: bool [m], whether each is the only image of its sample.
        side: pixels of a tile's side.
        cells: patches of a tile's side.
        tiles: how images are cut.
    """
    wide, high = widths.astype(np.int64), heights.astype(np.int64)
    found = np.zeros((len(wide), LAYOUT), np.int32)
    if tiles.choice is TileChoice.EDGE:
        found[:, :2] = _edge(wide, high, side, tiles.longest_edge or 1)
    elif tiles.choice is TileChoice.ASPECT:
        found[:, :2] = _aspect(wide, high, side, tiles.min_tiles or 1, tiles.max_tiles or 1)
    else:
        grids = np.array(tiles.grids or (), np.int64)
        found[:, :2] = grids[_pinpoint(wide, high, grids * side)] * lone[:, None]
        found[:, 2:4] = _unpadded(wide, high, found[:, :2].astype(np.int64) * cells)
        sizes, at = np.unique(found[:, 2:4], axis=0, return_inverse=True)
        shrunk = [_shrunk(rows, columns, (tiles.max_tiles or 1) * cells**2) for rows, columns in sizes.tolist()]
        found[:, 4:] = np.array(shrunk, np.int32).reshape(-1, 2)[at.reshape(-1)]
        found[~lone, 4:] = 1, 0  # its embeddings, and one for the end
    return found


def num_parts(layouts: I32, tiles: Tiles) -> I64:
    """Parts of each image, int64 [m]: tiles, and the picture of the whole where there is one."""
    cut = layouts[:, 0].astype(np.int64) * layouts[:, 1]
    if tiles.choice is TileChoice.PINPOINTS:
        return cut + 1
    return np.where(cut > 1, cut + 1, 1)


def layout_tokens(layouts: I32, sizing: Sizing) -> I64:
    """Embeddings of each image, int64 [m]."""
    assert sizing.tiles is not None
    assert sizing.side is not None
    each = (sizing.side // sizing.patch // sizing.merge) ** 2
    if sizing.tiles.choice is TileChoice.PINPOINTS:
        return each + layouts[:, 4].astype(np.int64) * (layouts[:, 5] + 1)
    return each * num_parts(layouts, sizing.tiles)


def mark_tokens(layouts: I32 | None, count: int, sizing: Sizing) -> I64:
    """Tokens of text before and between the embeddings of each of `count` images, int64 [m]."""
    marks = sizing.marks
    if marks is None:
        return np.zeros(count, np.int64)
    found = np.full(count, len(marks.alone), np.int64)
    if layouts is None:
        return found
    rows, columns = layouts[:, 0].astype(np.int64), layouts[:, 1].astype(np.int64)
    cut = rows * columns > 1
    of_tiles = np.zeros((int(rows.max(initial=0)) + 1, int(columns.max(initial=0)) + 1), np.int64)
    known = np.array([[len(ids) for ids in row] for row in marks.tiles], np.int64)
    if known.size:
        sums = known[: len(of_tiles) - 1, : of_tiles.shape[1] - 1].cumsum(0).cumsum(1)
        of_tiles[1:, 1:] = sums
    between = of_tiles[rows, columns] + (rows - 1) * len(marks.row_end) + len(marks.whole)
    return np.where(cut, between, found)


def _edge(wide: I64, high: I64, side: int, edge: int) -> I64:
    """Rows and columns of Idefics3's tiles, int64 [m, 2], which are one where an image is not cut."""
    first = _resized(high, wide, edge)
    lying = wide >= high
    short = np.maximum(1, first + first % 2)
    again = _resized(np.where(lying, short, edge), np.where(lying, edge, short), edge)
    fewer = np.maximum(1, -(-again // side))
    most = np.full_like(fewer, edge // side)
    return np.stack([np.where(lying, fewer, most), np.where(lying, most, fewer)], axis=1)


def _resized(high: I64, wide: I64, edge: int) -> I64:
    """int(edge / (long / short)) as doubles have it, int64 [m]."""
    long, short = np.maximum(wide, high), np.minimum(wide, high)
    found, rest = np.divmod(edge * short, long)
    divisor = np.gcd(long, short)
    for i in np.flatnonzero(rest == 0).tolist():
        found[i] = _in_doubles(int(long[i] // divisor[i]), int(short[i] // divisor[i]), edge, bool(wide[i] >= high[i]))
    return found


@lru_cache(1 << 16)
def _in_doubles(long: int, short: int, edge: int, lying: bool) -> int:
    """The same where it is whole before it is rounded down; of images that stand it is int(edge * (short / long))."""
    if lying:
        return floor(as_double(Fraction(edge, as_double(Fraction(long, short)))))
    return floor(as_double(edge * as_double(Fraction(short, long))))


def _aspect(wide: I64, high: I64, side: int, least: int, most: int) -> I64:
    """Rows and columns of InternVL's tiles, int64 [m, 2]."""
    room = np.minimum((2 * wide * high - 1) // side**2, most)  # most tiles whose pixels are less than twice the image's
    found, doubtful = np.ones((len(wide), 2), np.int64), np.zeros(len(wide), np.bool_)
    above, below = np.ones_like(wide), np.zeros_like(wide)  # the best difference; the first grid is better than none
    over = np.zeros(len(wide), np.int64)  # on which side of the image's aspect the best one is
    for columns, rows, _ in _aspects(least, most):
        signed = wide * rows - columns * high
        differs, other = np.abs(signed) * below, above * rows
        same = differs == other
        better = (differs < other) | (below == 0) | (same & (columns * rows <= room))
        doubtful = (doubtful & (differs >= other)) | (same & (np.sign(signed) != over) & (below > 0))
        found[better] = rows, columns
        over = np.where(better, np.sign(signed), over)
        above, below = np.where(better, np.abs(signed), above), np.where(better, rows, below)
    divisor = np.gcd(wide, high)
    for i in np.flatnonzero(doubtful).tolist():
        reduced = int(wide[i] // divisor[i]), int(high[i] // divisor[i])
        found[i] = _aspect_in_doubles(*reduced, int(room[i]), least, most)
    return found


@lru_cache(64)
def _aspects(least: int, most: int) -> tuple[tuple[int, int, Fraction], ...]:
    """Columns, rows and their quotient as a double of all grids with so many tiles, the fewest first."""
    sides = range(1, most + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    return tuple((columns, rows, as_double(Fraction(columns, rows))) for columns, rows in grids)


@lru_cache(1 << 16)
def _aspect_in_doubles(width: int, height: int, room: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns where two grids are as far from an image's aspect, one wider and one narrower.

    Args:
        width, height: the image's, without their common divisor.
        room: a grid of at most so many tiles goes before one that is as near and comes first.
        least, most: tiles.
    """
    aspect, best, found = as_double(Fraction(width, height)), None, (1, 1)
    for columns, rows, of_grid in _aspects(least, most):
        differs = _positive(abs(aspect - of_grid))
        if best is None or differs < best or (differs == best and columns * rows <= room):
            best, found = differs, (rows, columns)
    return found


def _positive(value: Fraction) -> Fraction:
    return as_double(value) if value else value


def _pinpoint(wide: I64, high: I64, canvases: I64) -> I64:
    """Which of some canvases, int64 [k, 2] rows and columns of pixels, OneVision takes, int64 [m]."""
    best, kept, wasted = np.zeros_like(wide), np.zeros_like(wide), np.full_like(wide, np.iinfo(np.int64).max)
    for number, (down, across) in enumerate(canvases.tolist()):
        narrow = across * high < down * wide  # the width decides, and of equal scales it does not matter which
        scaled_wide = np.where(narrow, floor_products(wide, across, wide), floor_products(wide, down, high))
        scaled_high = np.where(narrow, floor_products(high, across, wide), floor_products(high, down, high))
        effective = np.minimum(scaled_wide * scaled_high, wide * high)
        waste = down * across - effective
        better = (effective > kept) | ((effective == kept) & (waste < wasted))
        best = np.where(better, number, best)
        kept, wasted = np.where(better, effective, kept), np.where(better, waste, wasted)
    return best


def floor_products(factor: I64, numerator: int, denominator: I64) -> I64:
    """int(factor * (numerator / denominator)) as doubles have it, int64 [m], of positive numbers below 2^31.

    The product is less than the exact one where the quotient was rounded down. That matters where the exact one is
    whole: doubles then have it, or the largest double below.
    """
    found, rest = np.divmod(factor * numerator, denominator)
    whole = np.flatnonzero(rest == 0)
    if len(whole):
        divided, at = np.unique(denominator[whole], return_inverse=True)
        quotients = [_quotient(numerator, value) for value in divided.tolist()]
        short, shift = (np.array(part, np.int64)[at] for part in zip(*quotients, strict=True))
        exact = found[whole]
        exponent = np.searchsorted(_POWERS, exact, side="right") - 1
        # below the exact product by factor * short / (denominator * 2^shift), and doubles there by 2^(exponent - 53)
        gap = np.where(exact == np.left_shift(1, exponent), exponent - _BITS, exponent - _BITS + 1) + shift - 1
        missing = factor[whole] * short
        bound = np.where(gap >= 0, np.left_shift(denominator[whole], np.maximum(gap, 0)), denominator[whole])
        missing = np.where(gap >= 0, missing, np.left_shift(missing, np.maximum(-gap, 0)))
        found[whole] -= missing > bound
    return found


@lru_cache(1 << 16)
def _quotient(numerator: int, denominator: int) -> tuple[int, int]:
    """By how many 2^-shift of the numerator a rounded quotient times its denominator is less, 0 if it is not; shift."""
    shift = _BITS - (numerator.bit_length() - denominator.bit_length())
    if numerator << shift >= denominator << _BITS:
        shift -= 1
    mantissa, rest = divmod(numerator << shift, denominator)
    is_up = 2 * rest > denominator or (2 * rest == denominator and mantissa % 2 == 1)
    return 0 if is_up else rest, shift


def _unpadded(wide: I64, high: I64, current: I64) -> NDArray[Any]:
    """Rows and columns of embeddings without borders, int64 [m, 2], of those of all tiles."""
    rows, columns = current[:, 0], current[:, 1]
    lying = wide * rows > columns * high
    rest = np.where(lying, rows - high * columns // wide, columns - wide * rows // high) // 2 * 2
    return np.stack([np.where(lying, rows - rest, rows), np.where(lying, columns, columns - rest)], axis=1)


@lru_cache(1 << 16)
def _shrunk(rows: int, columns: int, most: int) -> tuple[int, int]:
    """Rows and columns of embeddings, at least one of each, where there may be so many, and a fifth more."""
    if not rows * columns:
        return rows, columns
    ratio = root_as_double(as_double(Fraction(rows * columns, most)))
    if ratio <= as_double(Fraction(11, 10)):
        return rows, columns
    return max(1, rows // ratio), max(1, columns // ratio)
