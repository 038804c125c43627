"""Learned positions of patches: a square grid of them, and how it is read for images of other grids."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from trainclient.models.attention import Segments

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
    found = [learned[:0]]
    parts = torch.split(positions, list(segments.lengths))
    for (rows, columns), (row, column) in zip(grid.tolist(), (p.unbind(1) for p in parts), strict=True):
        if (rows, columns) == (side, side):
            found.append(learned[row * columns + column])
        elif scaling == "nearest":
            found.append(learned[row * side // rows * side + column * side // columns])
        else:
            picture = learned.view(side, side, -1).permute(2, 0, 1)[None]
            aligned = scaling == "bilinear"
            mode, smooth = _MODES.get(scaling, scaling), scaling in _MODES
            scaled = F.interpolate(picture, (rows, columns), mode=mode, align_corners=aligned, antialias=smooth)
            found.append(scaled[0].flatten(1).T[row * columns + column])
    return torch.cat(found)
