"""RMSNorm of rows, also Gemma's, whose weights count from one."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from trainclient.models.rotary import at_least_float32


class RmsNorm(nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.normed(x, self.weight)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same with a weight [width] that stands for its own."""
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class OffsetNorm(RmsNorm):
    """RMSNorm that multiplies by 1 + weight in at least float32 before it rounds (Gemma, arXiv 2403.08295)."""

    initial_values: ClassVar[dict[str, float]] = {"weight": 0.0}

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Scale by one plus the weight, at float32 or more."""
        precise = at_least_float32(x.dtype)
        return super().normed(x.to(precise), 1 + weight.to(precise)).to(x.dtype)
