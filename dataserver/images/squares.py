"""An image in the middle of a square of one colour, as the processors of LLaVA 1.5 and LLaVA-OneVision pad it."""

from math import ceil, floor
from typing import Final

import numpy as np

from dataserver.images.patches import U8, write_patches
from dataserver.images.resampling import REACH, needed, resized
from dataserver.planning.job.fields import BACKGROUND, Sizing

BAND: Final = 256
"""Rows that are scaled at a time, so that borders take little memory."""
Colour = tuple[int, int, int]
"""Red, green and blue, each from 0 to 255."""


def write_padded(pixels: U8, sizing: Sizing, out: U8) -> None:
    """Pad an upright image to a square, scale it and cut it into patches.

    Args:
        pixels: uint8 [height, width, 3]: the image, or the image at a smaller scale.
        sizing: with the rule `pad`.
        out: uint8 [patches, patch * patch * 3], overwritten.

    Raises:
        ValueError: the sizing has no side or no filter.
    """
    if sizing.side is None or sizing.resampling is None:
        raise ValueError(f"found a sizing of rule {sizing.rule}; side and resampling are required")
    used = sizing.side // sizing.patch * sizing.patch
    square = in_square(pixels, sizing.side, sizing.background or BACKGROUND, sizing)
    write_patches(square[:used, :used], sizing, out)


def in_square(pixels: U8, side: int, colour: Colour, sizing: Sizing) -> U8:
    """A picture in the middle of a square of a colour, scaled to `side` x `side` pixels, uint8 [side, side, 3].

    The square could be far larger than the picture, so it is never made. A picture that is longer than `side` times its
    short side counts as so long, and still gets a pixel.
    """
    height, width, _ = pixels.shape
    most = side * min(height, width)
    if max(height, width) > most:
        pixels = resized(pixels, (width, height), (min(width, most), min(height, most)), sizing)
    length = max(pixels.shape[:2])
    rows = _with_borders(pixels, length, side, colour, sizing)  # rows first, as Pillow scales a square
    return _with_borders(rows.transpose(1, 0, 2), length, side, colour, sizing).transpose(1, 0, 2)


def _with_borders(pixels: U8, length: int, side: int, colour: Colour, sizing: Sizing) -> U8:
    """Scale rows, with a colour on both sides up to `length` pixels, to `side` pixels; uint8 [height, side, 3].

    Only as much of the colour as a filter mixes with the picture is scaled with it, some rows at a time.
    """
    height, width, _ = pixels.shape
    left, reach = (length - width) // 2, REACH * max(1.0, length / side) + 1
    first = max(0, floor((left - reach) * side / length))
    last = min(side, ceil((left + width + reach) * side / length))
    start, stop = first * length / side, last * length / side
    begin, end = needed(start, stop, length, last - first)
    scaled = np.full((height, side, 3), colour, np.uint8)
    for top in range(0, height, BAND):
        band = pixels[top : top + BAND]
        canvas = np.full((len(band), end - begin, 3), colour, np.uint8)
        canvas[:, left - begin : left - begin + width] = band
        box = (start - begin, 0, stop - begin, len(band))
        target = last - first, len(band)
        scaled[top : top + BAND, first:last] = resized(canvas, (end - begin, len(band)), target, sizing, box)
    return scaled
