"""The layers that the encoder, the backbone and the generator share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import pi
from types import MappingProxyType
from typing import ClassVar, Final, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from trainclient.models.attention import HeadSharing, Segments, packed_attention, shared_attention

MODULATION_STD = 0.02
"""Initial standard deviation of what modulates a normalised activation: close to no modulation, but not zero."""


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "quick_gelu": _quick_gelu}
)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and angles: float64 stays, anything smaller becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Stretches rotary wave lengths for longer sequences: all of them, or the long ones, as in Llama 3.1."""

    factor: float
    """By which wave lengths grow."""
    original_positions: int = 0
    """Longest sequence before; 0 stretches all wave lengths alike."""
    low: float = 1.0
    """Waves with fewer turns than this in such a sequence are stretched."""
    high: float = 4.0
    """Waves with more turns are not; between the two, partly."""

    def __call__(self, frequencies: Tensor) -> Tensor:
        """The frequencies after stretching."""
        stretched = frequencies / self.factor
        if not self.original_positions:
            return stretched
        kept = ((self.original_positions * frequencies / (2 * pi) - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * stretched + kept * frequencies


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary position embedding of each row (RoFormer, arXiv 2104.09864): cosines and sines [rows, 1, head_dim / 2]."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(
        cls, positions: Tensor, head_dim: int, base: float, dtype: torch.dtype, scaling: RotaryScaling | None = None
    ) -> "Rotation":
        """Rotation by positions along one or more axes.

        Args:
            positions: integers [rows, axes]; each axis turns an equal share of the head_dim / 2 pairs.
            head_dim: a multiple of 2 * axes.
            base: of the geometric series of wave lengths.
            dtype: of the activations; the result is at least float32. Angles are taken in float64.
            scaling: of the wave lengths.
        """
        share = head_dim // (2 * positions.shape[1])
        exponent = torch.arange(share, dtype=torch.float64, device=positions.device) / share
        frequencies = base**-exponent
        if scaling is not None:
            frequencies = scaling(frequencies)
        angles = (positions.to(torch.float64)[:, :, None] * frequencies).flatten(1)[:, None]
        precise = at_least_float32(dtype)
        return cls(angles.cos().to(precise), angles.sin().to(precise))

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [rows, heads, head_dim]; same shape and dtype."""
        first, second = heads.to(self.cosine.dtype).chunk(2, dim=-1)
        turned = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return torch.cat(turned, dim=-1).to(heads.dtype)


class SplitLayer(nn.Module):
    """A layer that tensor-parallel ranks can share: each computes a part of what lies between its projections.

    Its inputs must be the same on all of them, and the layer must take sizes from what its projections give.
    """

    columns: ClassVar[tuple[str, ...]]
    """Linear layers split by their outputs: each rank has an equal part."""
    rows: ClassVar[tuple[str, ...]]
    """Linear layers split by their inputs; their outputs are summed over the ranks."""


class SelfAttention(SplitLayer):
    """Multi-head, optionally grouped-query, attention inside packed segments, with or without rotary positions."""

    columns, rows = ("query", "key", "value"), ("output",)

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        *,
        bias: bool,
        causal: bool,
        output_bias: bool | None = None,
        head_dim: int | None = None,
    ) -> None:
        """Attention; `output_bias` is `bias` and `head_dim` is width / heads unless given."""
        super().__init__()
        self.attend = packed_attention
        self.causal = causal
        self.head_dim = width // heads if head_dim is None else head_dim
        self.query = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.key = nn.Linear(width, groups * self.head_dim, bias=bias)
        self.value = nn.Linear(width, groups * self.head_dim, bias=bias)
        self.output = nn.Linear(heads * self.head_dim, width, bias=bias if output_bias is None else output_bias)

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation | None) -> Tensor:
        """Attend: [rows, width] -> [rows, width]."""
        if segments.sharing is not None:
            mixed = self.attend_together(x, segments, segments.sharing, rotation)
        else:
            query, key, value = self._heads(x, rotation)
            mixed = self.attend(query, key, value, segments, causal=self.causal)
        return cast(Tensor, self.output(mixed.flatten(1)))

    def attend_together(self, x: Tensor, segments: Segments, sharing: HeadSharing, rotation: Rotation | None) -> Tensor:
        """Attend with ranks that share the rows: [rows, width] -> [rows, heads, head_dim]."""
        return shared_attention(self._heads(x, rotation), segments, sharing, causal=self.causal)

    def _heads(self, x: Tensor, rotation: Rotation | None) -> Iterator[Tensor]:
        """Queries, keys and values, each computed when it is asked for."""
        for projection, turn in ((self.query, rotation), (self.key, rotation), (self.value, None)):
            heads: Tensor = projection(x).unflatten(-1, (-1, self.head_dim))
            yield heads if turn is None else turn(heads)


class CrossAttention(SplitLayer):
    """Multi-head attention of packed segments to the packed conditions of the same segment."""

    columns, rows = ("query", "key", "value"), ("output",)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attend = packed_attention
        self.head_dim = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # one would add the same to all scores of a query
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, segments: Segments, conditions: Tensor, condition_segments: Segments) -> Tensor:
        """Attend: [rows, width] to [conditions, width] -> [rows, width]."""
        # All layers take the same conditions. Sums in bfloat16 depend on their order: with a node of its own each layer
        # adds up its two gradients first, as it does where FSDP wraps it.
        conditions = conditions.view_as(conditions)
        inputs = (self.query, x), (self.key, conditions), (self.value, conditions)
        query, key, value = (project(rows).unflatten(-1, (-1, self.head_dim)) for project, rows in inputs)
        mixed = self.attend(query, key, value, segments, condition_segments)
        return cast(Tensor, self.output(mixed.flatten(1)))


class Mlp(SplitLayer):
    """Two linear layers with an activation between."""

    columns, rows = ("up",), ("down",)

    def __init__(self, width: int, hidden: int, output: int | None = None, activation: str = "gelu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width if output is None else output)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, output]."""
        return cast(Tensor, self.down(self.activation(self.up(x))))


class SwiGlu(SplitLayer):
    """Gated linear unit with SiLU (arXiv 2002.05202), without biases."""

    columns, rows = ("gate", "up"), ("down",)

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


def require_heads(kind: str, width: int, heads: int, groups: int, axes: int, head_dim: int | None = None) -> None:
    """Raise ValueError unless heads of `width`, or of their own size, can be grouped and rotated along `axes` axes."""
    fits = min(width, heads, groups) >= 1 and heads % groups == 0
    if fits and head_dim is not None:
        if head_dim < 1 or head_dim % (2 * axes):
            raise ValueError(f"{kind} has heads of size {head_dim}; a positive multiple of {2 * axes} is required")
    elif not fits or width % heads or width // heads % (2 * axes):
        raise ValueError(
            f"{kind} of width {width} cannot have {heads} heads in {groups} groups: width must be a multiple of heads, "
            f"heads of groups, and the head size (width / heads) of {2 * axes}"
        )
