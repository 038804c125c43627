"""An image cut into tiles, as the processors of LLaVA-OneVision, InternVL and Idefics3 do (transformers 5.24)."""

from math import ceil
from typing import Final

import numpy as np

from dataserver.images.patches import U8, write_patches
from dataserver.images.resampling import resized
from dataserver.images.squares import in_square
from dataserver.images.truncation import Size
from dataserver.planning.job.fields import Sizing, TileChoice

GREY: Final = (127, 127, 127)
"""The borders of a square around one of several images: the mean 0.5 of the models' pixels."""


def write_tiles(pixels: U8, size: Size, planned: Size, tiles: tuple[int, int], sizing: Sizing, out: U8) -> None:
    """Scale an upright image and cut it into the patches of all its parts, one after the other.

    Args:
        pixels: uint8 [height, width, 3]: the image at 1/1, 1/2, 1/4 or 1/8 of its size, rounded up.
        size: (width, height) of the image.
        planned: the size by which the plan cuts it; another one where transforms changed the image. It decides what
            the image is scaled to: the plan has no embeddings of borders.
        tiles: rows and columns of tiles; 0 where it is not cut.
        sizing: with the rule `tiles`.
        out: uint8 [parts * cells^2, patch * patch * 3], overwritten.

    Raises:
        ValueError: the sizing has no tiles or no filter.
    """
    if sizing.tiles is None or sizing.side is None or sizing.resampling is None:
        raise ValueError(f"found a sizing of rule {sizing.rule}; tiles, side and resampling are required")
    side, (rows, columns) = sizing.side, tiles
    whole = (side, side)
    if sizing.tiles.choice is TileChoice.PINPOINTS:
        if not rows * columns:
            parts = [in_square(pixels, side, GREY, sizing)]
        else:
            scaled = resized(pixels, size, _within(planned, (columns * side, rows * side)), sizing)
            canvas = _centred(scaled, rows * side, columns * side)
            parts = [resized(pixels, size, whole, sizing), *_cut(canvas, side)]
    elif sizing.tiles.choice is TileChoice.ASPECT:
        parts = _cut(resized(pixels, size, (columns * side, rows * side), sizing), side)
        if len(parts) > 1:
            parts.append(resized(pixels, size, whole, sizing))
    else:
        first = _edge(planned, sizing.tiles.longest_edge or 1)
        canvas = resized(resized(pixels, size, first, sizing), first, (columns * side, rows * side), sizing)
        parts = _cut(canvas, side)
        if len(parts) > 1:
            parts.append(resized(canvas, canvas.shape[1::-1], whole, sizing))
    used = side // sizing.patch * sizing.patch
    write_patches(np.concatenate([part[:used, :used] for part in parts]), sizing, out)


def _cut(canvas: U8, side: int) -> list[U8]:
    """The tiles of a picture, row by row."""
    rows, columns = canvas.shape[0] // side, canvas.shape[1] // side
    return [
        canvas[row * side : (row + 1) * side, column * side : (column + 1) * side]
        for row in range(rows)
        for column in range(columns)
    ]


def _within(size: Size, canvas: Size) -> Size:
    """What an image of some size is scaled to within a canvas, both (width, height)."""
    scale_wide, scale_high = canvas[0] / size[0], canvas[1] / size[1]
    if scale_wide < scale_high:
        return canvas[0], min(ceil(size[1] * scale_wide), canvas[1])
    return min(ceil(size[0] * scale_high), canvas[0]), canvas[1]


def _centred(pixels: U8, height: int, width: int) -> U8:
    """A picture within black borders; the right and the lower one may be a pixel wider."""
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - pixels.shape[0]) // 2, (width - pixels.shape[1]) // 2
    canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas


def _edge(size: Size, edge: int) -> Size:
    """The size at which Idefics3 scales an image first: its long side is `edge`, the short one even."""
    width, height = size
    aspect = width / height
    if width >= height:
        short = int(edge / aspect)
        return edge, max(1, short + short % 2)
    short = int(edge * aspect)
    return max(1, short + short % 2), edge
