"""Upright pixels cut into patches, merge-block-major."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.jobspec import Sizing

U8 = NDArray[np.uint8]

UPRIGHT: Final[dict[int, Callable[[U8], U8]]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels.transpose(1, 0, 2)[:, ::-1],
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: pixels.transpose(1, 0, 2)[::-1],
}
"""What turns an image of each EXIF orientation upright; orientation 1 is upright."""


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
