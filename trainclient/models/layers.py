"""The layers that the encoder, the backbone and the generator share."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Final, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from trainclient.models.attention import HeadSharing, Segments, packed_attention, shared_attention
from trainclient.models.norms import RmsNorm
from trainclient.models.rotary import Rotation

MODULATION_STD = 0.02
"""Initial standard deviation of what modulates a normalised activation: close to no modulation, but not zero."""


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "quick_gelu": _quick_gelu, "silu": F.silu}
)


class SplitLayer(nn.Module):
    """A layer that tensor-parallel ranks can share: each computes a part of what lies between its projections.

    Its inputs must be the same on all of them, and the layer must take sizes from what its projections give.
    """

    columns: ClassVar[tuple[str, ...]]
    """Linear layers split by their outputs: each rank has an equal part."""
    rows: ClassVar[tuple[str, ...]]
    """Linear layers split by their inputs; their outputs are summed over the ranks."""
    replicated: Callable[[Tensor], Tensor] = staticmethod(lambda weight: weight)
    """What weights that act within each rank's part go through: where ranks split the layer, their gradients are summed
    over the ranks."""


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
        key_bias: bool | None = None,
        output_bias: bool | None = None,
        head_dim: int | None = None,
        head_norm: Callable[[int], RmsNorm] | None = None,
        window: int = 0,
        two_way: bool = False,
        score_scale: float = 0.0,
    ) -> None:
        """Make the layer.

        Args:
            width: of the rows.
            heads: of queries.
            groups: heads of keys and values.
            bias: whether queries, keys and values have biases.
            causal: whether a row sees only itself and rows before it.
            key_bias: whether keys have a bias; by default as `bias`.
            output_bias: whether the output has a bias; by default as `bias`.
            head_dim: size of a head; by default width / heads.
            head_norm: makes the norm of each query head, and that of each key head, from their size; by default none.
            window: how many rows a row sees at most, counting itself; 0: all of its segment.
            two_way: whether blocks of rows see each other both ways (`Segments.blocks`).
            score_scale: by which scores are multiplied; 0: head_dim^-0.5.
        """
        super().__init__()
        self.attend = packed_attention
        self.causal = causal
        self.window = window
        self.two_way = two_way
        self.head_dim = width // heads if head_dim is None else head_dim
        self.query = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.key = nn.Linear(width, groups * self.head_dim, bias=bias if key_bias is None else key_bias)
        self.value = nn.Linear(width, groups * self.head_dim, bias=bias)
        self.output = nn.Linear(heads * self.head_dim, width, bias=bias if output_bias is None else output_bias)
        self.query_factor = score_scale * self.head_dim**0.5 if score_scale else 1.0
        self.query_norm = None if head_norm is None else head_norm(self.head_dim)
        self.key_norm = None if head_norm is None else head_norm(self.head_dim)

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation | None) -> Tensor:
        """Attend: [rows, width] -> [rows, width]."""
        if segments.sharing is not None:
            mixed = self.attend_together(x, segments, segments.sharing, rotation)
        else:
            query, key, value = self._heads(x, rotation)
            mixed = self.attend(query, key, value, segments, causal=self.causal, window=self.window)
        return cast(Tensor, self.output(mixed.flatten(1)))

    def attend_together(self, x: Tensor, segments: Segments, sharing: HeadSharing, rotation: Rotation | None) -> Tensor:
        """Attend with ranks that share the rows: [rows, width] -> [rows, heads, head_dim]."""
        heads = self._heads(x, rotation)
        return shared_attention(heads, segments, sharing, causal=self.causal, window=self.window)

    def _heads(self, x: Tensor, rotation: Rotation | None) -> Iterator[Tensor]:
        """Queries, keys and values, each computed when it is asked for."""
        projections = ((self.query, self.query_norm, rotation), (self.key, self.key_norm, rotation))
        for projection, norm, turn in (*projections, (self.value, None, None)):
            heads: Tensor = projection(x).unflatten(-1, (-1, self.head_dim))
            if norm is not None:
                heads = norm.normed(heads, self.replicated(norm.weight))
            if projection is self.query and self.query_factor != 1.0:
                heads = heads * self.query_factor
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


class GatedMlp(SplitLayer):
    """Gated linear unit (arXiv 2002.05202); with SiLU it is SwiGLU."""

    columns, rows = ("gate", "up"), ("down",)

    def __init__(self, width: int, hidden: int, activation: str, *, bias: bool = False) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, width]."""
        return cast(Tensor, self.down(self.activation(self.gate(x)) * self.up(x)))


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
