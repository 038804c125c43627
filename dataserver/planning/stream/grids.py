"""Patch grids of images, by the rule that a stream's sizing names. All in integers."""

from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

import numpy as np

from dataserver.planning import I32, I64, Bool
from dataserver.planning.job.fields import MAX_ASPECT, Sizing, SizingRule
from dataserver.planning.stream.doubles import as_double, root_as_double
from dataserver.planning.stream.tiles import num_parts, tile_layouts


def patch_grid(width: int, height: int, sizing: Sizing) -> tuple[int, int]:
    """Rows and columns of an image's patch grid.

    By default the image is never enlarged beyond rounding to whole merge blocks; one with more than `max_patches` is
    scaled down with its aspect kept. With a rule it is what the image processor of that name makes.

    Args:
        width: upright width in pixels, positive.
        height: upright height in pixels, positive.
        sizing: rule, patch, merge and bounds.

    Returns:
        (rows, columns) in patches, both positive multiples of `merge`, rows * columns <= max_patches. Of an image that
        is cut into tiles, the only one of its sample, the rows of all parts one below the other.
    """
    rows, columns = patch_grids(np.array([width]), np.array([height]), sizing)
    return int(rows[0]), int(columns[0])


def patch_grids(widths: I32 | I64, heights: I32 | I64, sizing: Sizing) -> tuple[I32, I32]:
    """`patch_grid` of many images: int32 [m] and int32 [m]. Sides up to 2^31 - 1 overflow nowhere."""
    from dataserver.planning.kernels.sized import grids, naflex_grids

    if (layouts := image_layouts(widths, heights, np.ones(len(widths), np.bool_), sizing)) is not None:
        return stacked_grids(layouts, sizing)
    if sizing.side is not None:
        rows = np.full(len(widths), sizing.side // sizing.patch, np.int32)
        return rows, rows.copy()
    if sizing.rule is SizingRule.NAFLEX:
        return naflex_grids(widths.astype(np.int64), heights.astype(np.int64), sizing.patch, sizing.max_patches)
    if sizing.rule is SizingRule.QWEN:
        rows, columns = _qwen_grids(widths, heights, sizing)
    else:
        rows, columns = grids(widths, heights, sizing.patch * sizing.merge, sizing.max_patches // sizing.merge**2)
    return rows * np.int32(sizing.merge), columns * np.int32(sizing.merge)


def image_layouts(widths: I32 | I64, heights: I32 | I64, lone: Bool, sizing: Sizing) -> I32 | None:
    """How many images are cut into tiles, int32 [m, 6] (`tiles`); None where none is.

    Args:
        widths, heights: [m], upright pixels, positive.
        lone: bool [m], whether each is the only image of its sample.
        sizing: of all.
    """
    if sizing.tiles is None or sizing.side is None:
        return None
    return tile_layouts(widths, heights, lone, sizing.side, sizing.side // sizing.patch, sizing.tiles)


def stacked_grids(layouts: I32, sizing: Sizing) -> tuple[I32, I32]:
    """Rows and columns of patches of tiled images, int32 [m] each: those of all parts one below the other."""
    assert sizing.tiles is not None
    assert sizing.side is not None
    cells = sizing.side // sizing.patch
    parts = num_parts(layouts, sizing.tiles)
    return (parts * cells).astype(np.int32), np.full(len(parts), cells, np.int32)


def _qwen_grids(widths: I32 | I64, heights: I32 | I64, sizing: Sizing) -> tuple[I32, I32]:
    """Rows and columns of merge blocks by `smart_resize` of Qwen2-VL's image processor (transformers 5.24)."""
    from dataserver.planning.kernels.sized import qwen_grids

    block, least, most = sizing.patch * sizing.merge, sizing.min_pixels or 1, sizing.max_pixels or 1
    wide, high = (side.astype(np.int64) for side in (widths, heights))
    wide, high = np.minimum(wide, MAX_ASPECT * high), np.minimum(high, MAX_ASPECT * wide)
    rows, columns, ties = qwen_grids(wide, high, block, least, most, MAX_ASPECT)
    for i in np.flatnonzero(ties).tolist():
        width, height = int(wide[i]), int(high[i])
        is_enlarged = round(Fraction(height, block)) * round(Fraction(width, block)) * block**2 <= most
        bound = least if is_enlarged else most
        rows[i], columns[i] = scaled_in_doubles(width, height, 1, block, bound, is_enlarged)
    return rows, columns


@lru_cache(1 << 16)
def scaled_in_doubles(
    width: int, height: int, frames: int, block: int, pixels: int, is_enlarged: bool
) -> tuple[int, int]:
    """Rows and columns of blocks where a side is a whole number of them before it is rounded down or up.

    Args:
        width, height: of each frame, or of an image.
        frames: of a video; 1 of an image.
        block: pixels of a merge block's side.
        pixels: to which all frames are scaled.
        is_enlarged: whether these are more.
    """
    if is_enlarged:
        beta = root_as_double(as_double(Fraction(pixels, frames * height * width)))
        down, across = (ceil(as_double(Fraction(as_double(side * beta), block))) for side in (height, width))
    else:
        beta = root_as_double(as_double(Fraction(frames * height * width, pixels)))
        down, across = (floor(as_double(Fraction(as_double(Fraction(side, beta)), block))) for side in (height, width))
    return max(1, down), max(1, across)
