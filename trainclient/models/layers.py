"""The layers that the encoder, the backbone and the generator share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from trainclient.models.attention import Segments, packed_attention

MODULATION_STD = 0.02
"""Initial standard deviation of what modulates a normalised activation: close to no modulation, but not zero."""


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and angles: float64 stays, anything smaller becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary position embedding of each row (RoFormer, arXiv 2104.09864): cosines and sines [rows, 1, head_dim / 2]."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> "Rotation":
        """Rotation by positions along one or more axes.

        Args:
            positions: integers [rows, axes]; each axis turns an equal share of the head_dim / 2 pairs.
            head_dim: a multiple of 2 * axes.
            base: of the geometric series of wave lengths.
            dtype: of the activations; the result is at least float32. Angles are taken in float64.
        """
        share = head_dim // (2 * positions.shape[1])
        exponent = torch.arange(share, dtype=torch.float64, device=positions.device) / share
        angles = (positions.to(torch.float64)[:, :, None] * base**-exponent).flatten(1)[:, None]
        precise = at_least_float32(dtype)
        return cls(angles.cos().to(precise), angles.sin().to(precise))

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [rows, heads, head_dim]; same shape and dtype."""
        first, second = heads.to(self.cosine.dtype).chunk(2, dim=-1)
        turned = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return torch.cat(turned, dim=-1).to(heads.dtype)


class SelfAttention(nn.Module):
    """Multi-head, optionally grouped-query, attention inside packed segments with rotary positions."""

    def __init__(self, width: int, heads: int, groups: int, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim, self.causal = heads, groups, width // heads, causal
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.head_dim, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation) -> Tensor:
        """Attend: [rows, width] -> [rows, width]."""
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.groups, self.head_dim))
        query, key, value = heads.split([self.heads, self.groups, self.groups], dim=1)
        mixed = packed_attention(rotation(query), rotation(key), value, segments, causal=self.causal)
        return cast(Tensor, self.output(mixed.flatten(1)))


class CrossAttention(nn.Module):
    """Multi-head attention of packed segments to the packed conditions of the same segment."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, segments: Segments, conditions: Tensor, condition_segments: Segments) -> Tensor:
        """Attend: [rows, width] to [conditions, width] -> [rows, width]."""
        query = self.query(x).unflatten(-1, (self.heads, self.head_dim))
        key, value = self.key_value(conditions).unflatten(-1, (2, self.heads, self.head_dim)).unbind(1)
        mixed = packed_attention(query, key, value, segments, condition_segments)
        return cast(Tensor, self.output(mixed.flatten(1)))


class Mlp(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, width: int, hidden: int, output: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width if output is None else output)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, output]."""
        return cast(Tensor, self.down(F.gelu(self.up(x))))


class SwiGlu(nn.Module):
    """Gated linear unit with SiLU (arXiv 2002.05202), without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, width]."""
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Modulation(nn.Linear):
    """A linear layer whose outputs shift, scale and gate activations; it starts near zero."""

    initial_std = MODULATION_STD


def run_block(block: Callable[..., Tensor], *inputs: object, checkpoint: bool) -> Tensor:
    """Run a block; with `checkpoint`, keep only its inputs and compute it again in the backward pass."""
    if not checkpoint or not torch.is_grad_enabled():
        return block(*inputs)
    result = torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, result)


def require_heads(kind: str, width: int, heads: int, groups: int, axes: int) -> None:
    """Raise ValueError unless `heads` heads of `width` can be grouped and rotated along `axes` axes."""
    if min(width, heads, groups) < 1 or width % heads or heads % groups or width // heads % (2 * axes):
        raise ValueError(
            f"{kind} of width {width} cannot have {heads} heads in {groups} groups: width must be a multiple of heads, "
            f"heads of groups, and the head size (width / heads) of {2 * axes}"
        )
