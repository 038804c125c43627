"""Pixels scaled by Pillow's own filters, as image processors of released models do.

Pillow computes weights in doubles and pixels in integers of 22 bits, and scales one axis after the other. The order
decides how pixels are rounded, and releases differ in it: up to Pillow 12 rows are scaled first, from Pillow 13 on the
columns of some tall images. So each axis is scaled by a call of its own here, in an order that is a part of the
content. Where the whole image is scaled, and Pillow has the same order, pixels are those of `Image.resize` to the bit.
Where a part is cut out of the scaled image, only that part is computed, and pixels are off by one where a rounding
falls the other way.
"""

from collections.abc import Mapping
from math import ceil, floor
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from dataserver.images.patches import U8, write_patches
from dataserver.images.truncation import Size
from dataserver.planning.job.fields import Resampling, Sizing, SizingRule

_FILTERS: Final[Mapping[Resampling, int]] = MappingProxyType(
    {Resampling.BILINEAR: 2, Resampling.BICUBIC: 3, Resampling.LANCZOS: 1}
)
"""Numbers of filters in Pillow, which configurations of image processors have as well."""
REACH: Final = 3
"""Pixels of the smaller scale that the widest filter, Lanczos, reads to either side."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a part of an image, in its pixels."""


class Target(NamedTuple):
    """The size that an upright image is scaled to, and where the part of it lies that is cut into patches."""

    width: int
    height: int
    left: int = 0
    top: int = 0


def target_of(size: Size, rows: int, columns: int, sizing: Sizing) -> Target:
    """What an upright image of some size (width, height) is scaled to, for a grid of so many patches.

    Args:
        size: of the image.
        rows, columns: the grid that a plan gives the image.
        sizing: the rule, with its pixels.
    """
    if sizing.side is None:
        return Target(columns * sizing.patch, rows * sizing.patch)
    if sizing.rule is SizingRule.SQUARE:
        return Target(sizing.side, sizing.side)
    if sizing.rule is SizingRule.PAD:
        width, height = (max(1, sizing.side * side // max(size)) for side in size)
        return Target(width, height)
    edge, short = sizing.shortest_edge or sizing.side, min(size)
    width, height = (edge * side // short for side in size)
    return Target(width, height, (width - sizing.side) // 2, (height - sizing.side) // 2)


def write_resampled(pixels: U8, size: Size, target: Target, shape: tuple[int, int], sizing: Sizing, out: U8) -> None:
    """Scale an upright image, and cut the part of it that is wanted into patches.

    Args:
        pixels: uint8 [height, width, 3]: the image at 1/1, 1/2, 1/4 or 1/8 of its size, rounded up.
        size: (width, height) of the image.
        target: what it is scaled to, and where the part begins.
        shape: rows and columns of patches of that part.
        sizing: filter, patch and merge.
        out: uint8 [patches, patch * patch * 3], overwritten.

    Raises:
        ValueError: the pixels are not the image at one of these sizes.
    """
    if sizing.resampling is None:
        raise ValueError("found a sizing without resampling; the name of a filter is required")
    wide, high = size[0] / _reduction(pixels, size), size[1] / _reduction(pixels, size)
    part = shape[1] * sizing.patch, shape[0] * sizing.patch
    box: Box = (
        target.left * wide / target.width,
        target.top * high / target.height,
        min(wide, (target.left + part[0]) * wide / target.width),
        min(high, (target.top + part[1]) * high / target.height),
    )
    columns_first = scales_columns_first(size, target)
    write_patches(_scaled(pixels, part, box, _FILTERS[sizing.resampling], columns_first), sizing, out)


def resized(pixels: U8, size: Size, target: Size, sizing: Sizing, box: Box | None = None) -> U8:
    """Scale an upright image to another size, both (width, height); uint8 [height, width, 3].

    Arguments and errors are those of `write_resampled`; `box` is the part that is scaled, by default all of it.
    """
    if sizing.resampling is None:
        raise ValueError("found a sizing without resampling; the name of a filter is required")
    reduction = _reduction(pixels, size)
    box = box or (0, 0, size[0] / reduction, size[1] / reduction)
    columns_first = scales_columns_first(size, Target(*target))
    return _scaled(pixels, target, box, _FILTERS[sizing.resampling], columns_first)


def scales_columns_first(size: Size, target: Target) -> bool:
    """The order of the two passes that scale an image of some size (width, height).

    Rows are scaled first, as all releases of Pillow do with most images, unless they grow and columns shrink: then the
    image between the passes could be much larger than what goes in and what comes out.
    """
    return target.width > size[0] and target.height < size[1]


def needed(first: float, last: float, length: int, part: int) -> tuple[int, int]:
    """The pixels of an axis, from and to, that any filter reads to scale a range of it to `part` pixels."""
    margin = REACH * max(1.0, (last - first) / part) + 1
    return max(0, floor(first - margin)), min(length, ceil(last + margin))


def _scaled(pixels: U8, part: Size, box: Box, resampling: int, columns_first: bool) -> U8:
    """Scale a box of an image to the size of a part, one axis after the other."""
    from PIL import Image

    x, end_x = needed(box[0], box[2], pixels.shape[1], part[0])
    y, end_y = needed(box[1], box[3], pixels.shape[0], part[1])
    left, top, right, bottom = box[0] - x, box[1] - y, box[2] - x, box[3] - y
    image = Image.fromarray(np.ascontiguousarray(pixels[y:end_y, x:end_x]))
    if columns_first:
        image = image.resize((image.width, part[1]), resampling, (0, top, image.width, bottom))
        return np.asarray(image.resize(part, resampling, (left, 0, right, part[1])))
    image = image.resize((part[0], image.height), resampling, (left, 0, right, image.height))
    return np.asarray(image.resize(part, resampling, (0, top, part[0], bottom)))


def _reduction(pixels: U8, size: Size) -> int:
    """By how much an image was reduced when it was decoded."""
    for reduced in (1, 2, 4, 8):
        if pixels.shape[1::-1] == (-(-size[0] // reduced), -(-size[1] // reduced)):
            return reduced
    raise ValueError(f"found pixels of {pixels.shape[1::-1]} that are no scale of an image of {size}")
