"""Learned positions of patches: a square grid of them, and how it is read for images of other grids."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from trainclient.models.attention import Segments
from trainclient.models.rotary import at_least_float32
from trainclient.upload import upload

SCALINGS: Final = ("bicubic", "bilinear", "nearest", "antialias", "smooth")
"""How positions lie between those of the learned grid: bicubic (SigLIP, CLIP), bilinear with the corners of both grids
on each other (Qwen3-VL), none between them, the one at the same share of the side (Idefics3), bilinear with
antialiasing (SigLIP 2), or bicubic with it (DINOv2 with registers)."""
_MODES: Final = {"antialias": "bilinear", "smooth": "bicubic"}


def learned_positions(
    learned: Tensor, side: int, grid: Tensor, segments: Segments, positions: Tensor, scaling: str = "bicubic"
) -> Tensor:
    """The position embedding of every patch, [P, width].

    Args:
        learned: [side * side, width].
        side: of the learned grid.
        grid: integers [images, 2], rows and columns in patches.
        segments: the images.
        positions: integers [P, 2], row and column of each patch.
        scaling: one of `SCALINGS`.
    """
    tables, firsts, rows = [learned[:0]], dict[tuple[int, int], int](), 0
    sizes = [(int(down), int(across)) for down, across in grid.tolist()]
    for size in dict.fromkeys(sizes):  # one table for all images of a grid, since each costs several kernels
        tables.append(_table(learned, side, size, scaling))
        firsts[size], rows = rows, rows + size[0] * size[1]
    begins = torch.tensor([(firsts[size], size[1]) for size in sizes], dtype=torch.int64).view(-1, 2)
    first, columns = upload(begins, positions.device)[segments.row_segments()].unbind(1)
    return torch.cat(tables)[first + positions[:, 0] * columns + positions[:, 1]]


def _table(learned: Tensor, side: int, size: tuple[int, int], scaling: str) -> Tensor:
    """The position embedding of every patch of a grid, row by row, [rows * columns, width]."""
    if size == (side, side):
        return learned
    precise = learned.to(at_least_float32(learned.dtype))  # torch has no antialiasing of bfloat16
    picture = precise.view(side, side, -1).permute(2, 0, 1)[None]
    if scaling == "nearest":
        down, across = (upload(torch.arange(n) * side // n, learned.device) for n in size)
        return picture[0].index_select(1, down).index_select(2, across).flatten(1).T.to(learned.dtype)
    mode, smooth = _MODES.get(scaling, scaling), scaling in _MODES
    scaled = F.interpolate(picture, size, mode=mode, align_corners=scaling == "bilinear", antialias=smooth)
    return scaled[0].flatten(1).T.to(learned.dtype)
