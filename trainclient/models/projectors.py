"""From the features of patches to rows of the backbone: merge x merge patches become one row.

The patches of such a block are consecutive (`patches`), so that a view of the features has them side by side.
"""

from typing import Final, cast

import torch.nn.functional as F
from torch import Tensor, nn

from trainclient.models.layers import Mlp
from trainclient.models.norms import OffsetNorm


class Pooled(nn.Module):
    """The mean of a block's patches, normed and projected, as in Gemma 3."""

    def __init__(self, width: int, merge: int, output_dim: int, eps: float) -> None:
        super().__init__()
        self.patches = merge**2
        self.norm = OffsetNorm(width, eps)
        self.linear = nn.Linear(width, output_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[blocks, merge^2 * width] -> [blocks, output_dim]."""
        return cast(Tensor, self.linear(self.norm(x.view(-1, self.patches, self.linear.in_features).mean(1))))


class NormedMerger(nn.Module):
    """A norm of whole blocks before two linear layers: how Qwen3-VL projects what earlier layers make."""

    def __init__(self, width: int, merge: int, output_dim: int, eps: float) -> None:
        super().__init__()
        self.merged = width * merge**2
        self.norm = nn.LayerNorm(self.merged, eps=eps)
        self.mlp = Mlp(self.merged, self.merged, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[P, width] -> [P / merge^2, output_dim]."""
        return cast(Tensor, self.mlp(self.norm(x.view(-1, self.merged))))


class NormedMlp(nn.Module):
    """A norm of whole blocks before two linear layers, the first as wide as the backbone (InternVL)."""

    def __init__(self, merged: int, output_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(merged, eps=1e-5)
        self.mlp = Mlp(merged, output_dim, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[blocks, merge^2 * width] -> [blocks, output_dim]."""
        return cast(Tensor, self.mlp(self.norm(x)))


PROJECTORS: Final = ("merger", "mlp", "normed_mlp", "linear", "pool")
"""Two linear layers, the first as wide as a block (Qwen2-VL) or as the backbone (LLaVA; InternVL with a norm); one
(Idefics3); and `Pooled` (Gemma 3)."""


def projector(kind: str, width: int, merge: int, output_dim: int, eps: float) -> nn.Module:
    """Make a projector from rows [blocks, merge^2 * width] to [blocks, output_dim].

    Args:
        kind: one of `PROJECTORS`.
        width: of a patch's features.
        merge: side of a block in patches.
        output_dim: width of the backbone.
        eps: of a norm.
    """
    merged = width * merge**2
    if kind == "pool":
        return Pooled(width, merge, output_dim, eps)
    if kind == "normed_mlp":
        return NormedMlp(merged, output_dim)
    if kind == "linear":
        return nn.Linear(merged, output_dim, bias=False)
    return Mlp(merged, merged if kind == "merger" else output_dim, output_dim)


class PatchEmbed(nn.Linear):
    """Embeds patches; those of videos have two frames, and a still image is both of them."""

    def __init__(self, patch: int, width: int, *, bias: bool, frames: int) -> None:
        super().__init__(frames * patch**2 * 3, width, bias=bias)
        self.frames = frames

    def forward(self, x: Tensor) -> Tensor:
        """[P, frames * patch^2 * 3], or [P, patch^2 * 3] of still images -> [P, width]."""
        is_still = x.shape[1] < self.in_features
        weight = self.weight.view(self.out_features, self.frames, -1).sum(1) if is_still else self.weight
        return F.linear(x, weight, self.bias)
