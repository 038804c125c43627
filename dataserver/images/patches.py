"""Upright pixels cut into patches, merge-block-major."""

import functools
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I64
from dataserver.planning.job.fields import Sizing

U8 = NDArray[np.uint8]
PixelOffsets = tuple[I64, I64]
"""int64 [height] and [width]: pixel (y, x) of an image lies at the sum of y's and x's, in pixels."""

CACHED_GRIDS: Final = 256
"""Grids whose offsets are cached, 8 KB each of 1,024 patches; a dataset has some hundred."""
TRANSPOSED: Final = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap width and height."""
UPRIGHT: Final[dict[int, Callable[[U8], U8]]] = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels.transpose(1, 0, 2)[:, ::-1],
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: pixels.transpose(1, 0, 2)[::-1],
}
"""What turns an image of each EXIF orientation upright."""
_ROWS_REVERSED, _COLUMNS_REVERSED = (3, 4, 6, 7), (2, 3, 7, 8)
"""Orientations in which stored rows or columns run against those of the upright image."""


def write_patches(pixels: U8, sizing: Sizing, out: U8) -> None:
    """Cut uint8 [rows * patch, columns * patch, 3] into `out`, uint8 [rows * columns, patch * patch * 3].

    Patches come merge-block-major: blocks of merge x merge patches row by row, within a block row by row.
    """
    patch, merge = sizing.patch, sizing.merge
    height, width, _ = pixels.shape
    # One row of one patch moves as one element: half the time of single bytes.
    line = np.dtype((np.void, patch * 3))
    lines = np.ascontiguousarray(pixels).reshape(height, width * 3).view(line)
    blocks = lines.reshape(height // (merge * patch), merge, patch, width // (merge * patch), merge)
    target = out.view(line).reshape(blocks.shape[0], blocks.shape[3], merge, merge, patch)
    target[...] = blocks.transpose(0, 3, 1, 4, 2)


@functools.lru_cache(CACHED_GRIDS)
def pixel_offsets(rows: int, columns: int, patch: int, merge: int, orientation: int) -> PixelOffsets:
    """Where the pixels of an image lie among its patches, which `write_patches` would cut.

    Args:
        rows, columns: patches of the upright image.
        patch: side of a patch.
        merge: side of a merge block, in patches.
        orientation: EXIF orientation of the image whose pixels (y, x) are.
    """
    area = patch**2
    down = _along(rows, patch, merge, (patch, merge * area, columns * merge * area))
    across = _along(columns, patch, merge, (1, area, merge**2 * area))
    if orientation in TRANSPOSED:
        down, across = across, down
    found = (
        down[::-1].copy() if orientation in _ROWS_REVERSED else down,
        across[::-1].copy() if orientation in _COLUMNS_REVERSED else across,
    )
    for shared in found:
        shared.flags.writeable = False
    return found


def _along(count: int, patch: int, merge: int, steps: tuple[int, int, int]) -> I64:
    """Part of the offsets along one side, by the steps to the next pixel, patch and merge block. int64 [pixels]."""
    number = np.arange(count * patch)
    found: I64 = number % patch * steps[0] + number // patch % merge * steps[1] + number // (patch * merge) * steps[2]
    return found
