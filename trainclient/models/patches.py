"""Images as packed patches: their order, their pixels as numbers, and back to a picture.

A patch is one row of patch * patch * 3 bytes in (y, x, channel) order. Inside an image the patches stand
merge-block-major: blocks of merge x merge patches row by row over the image, and row by row inside a block, so that
merge^2 consecutive rows are one backbone token (Qwen2-VL, arXiv 2409.12191, section 2.1).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from trainclient.models.attention import Segments
from trainclient.models.checks import require_integers, require_shape
from trainclient.models.rotary import at_least_float32
from trainclient.stream import positions
from trainclient.upload import upload

PIXELS: Final[Mapping[str, tuple[tuple[float, float, float], tuple[float, float, float]]]] = MappingProxyType(
    {
        "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
        "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    }
)
"""Mean and standard deviation of each channel, of pixels in [0, 1], by the name of the normalisation."""
_MOST: Final = 1.0
"""Largest mean and deviation of pixels in [0, 1]; larger ones are of pixels on another scale, such as [0, 255]."""


def pixel_statistics(pixels: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel.

    Args:
        pixels: a name in `PIXELS`, or three means and three deviations, such as `0.1 0.2 0.3 / 0.4 0.5 0.6`.

    Raises:
        ValueError: it is neither.
    """
    if pixels in PIXELS:
        return PIXELS[pixels]
    try:
        mean, std = (tuple(float(value) for value in values.split()) for values in pixels.split("/"))
    except ValueError:
        mean, std = (), ()
    if not (
        len(mean) == len(std) == 3 and all(-_MOST <= m <= _MOST for m in mean) and all(0 < s <= _MOST for s in std)
    ):
        raise ValueError(
            f"pixels is {pixels!r:.100}; one of {', '.join(PIXELS)} is required, or three means and three positive "
            f"deviations of pixels in [0, 1], of at most {_MOST:g}, such as '0.1 0.2 0.3 / 0.4 0.5 0.6'"
        )
    return mean, std


def pixels_named(mean: Sequence[float], std: Sequence[float]) -> str:
    """Name for mean and deviation: the inverse of `pixel_statistics`."""
    known = next((name for name, values in PIXELS.items() if values == (tuple(mean), tuple(std))), None)
    return known or " / ".join(" ".join(repr(float(value)) for value in values) for values in (mean, std))


def patch_positions(grid: Tensor, segments: Segments, merge: int, device: torch.device) -> Tensor:
    """The (row, column) of every patch, counted in patches.

    Args:
        grid: integers [images, 2], rows and columns of each image, both positive multiples of `merge`.
        segments: the images' rows in the packed patches; must agree with the grid.
        merge: side of a block in patches.
        device: where the result is needed.

    Returns:
        int64 [P, 2].

    Raises:
        ValueError: the grid does not fit the segments or the merge.
    """
    require_integers("grid", grid)
    require_shape("grid", grid, len(segments), 2)
    for number, ((rows, columns), length) in enumerate(zip(grid.tolist(), segments.lengths, strict=True)):
        if min(rows, columns) < 1 or rows % merge or columns % merge:
            raise ValueError(
                f"image {number} has a grid of {rows} x {columns} patches; both must be positive multiples of "
                f"merge = {merge}"
            )
        if rows * columns != length:
            raise ValueError(
                f"image {number} has a grid of {rows} x {columns} patches, but cu_patches gives it {length}"
            )
    grids = np.array(grid.tolist(), np.int64).reshape(-1, 2)
    return upload(torch.from_numpy(positions.patch_positions(grids, merge)), device)


def normalise(patches: Tensor, patch: int, dtype: torch.dtype, pixels: str = "half") -> Tensor:
    """Pixels as numbers: in [-1, 1], or with the mean and deviation of other pictures.

    Args:
        patches: uint8 [P, patch * patch * 3].
        patch: side of a patch in pixels.
        dtype: floating dtype of the result.
        pixels: name of the normalisation, or its numbers.

    Raises:
        ValueError: another dtype or row length.
    """
    if patches.dtype != torch.uint8:
        raise ValueError(f"patches have dtype {patches.dtype}; uint8 is required (the module normalises them)")
    require_shape("patches", patches, -1, patch * patch * 3)
    colours = patches.to(at_least_float32(dtype)).view(len(patches), patch * patch, 3).unbind(2)
    known = zip(colours, *pixel_statistics(pixels), strict=True)
    # Rounded once: in bfloat16 a difference of two rounded numbers is off by more than one of its steps.
    return torch.stack([values / (255 * std) - mean / std for values, mean, std in known], dim=2).flatten(1).to(dtype)


def to_pixels(values: Tensor) -> Tensor:
    """The inverse of `normalise` to [-1, 1], rounded and clamped: uint8 of the same shape."""
    return ((values + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def assemble_image(patches: Tensor, rows: int, columns: int, patch: int, merge: int) -> Tensor:
    """The picture that the patches of one image show.

    Args:
        patches: [rows * columns, patch * patch * 3] in merge-block-major order.
        rows: grid rows, a multiple of `merge`.
        columns: grid columns, a multiple of `merge`.
        patch: side of a patch in pixels.
        merge: side of a block in patches.

    Returns:
        [rows * patch, columns * patch, 3], same dtype.
    """
    require_shape("patches", patches, rows * columns, patch * patch * 3)
    blocks = patches.view(rows // merge, columns // merge, merge, merge, patch, patch, 3)
    return blocks.permute(0, 2, 4, 1, 3, 5, 6).reshape(rows * patch, columns * patch, 3)
