"""What a module holds on a device: parameters with what trains them, and what backwards need of rows.

The solver of layouts counts with it, and `trainclient memory` for jobs that there are already.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dataserver.planning.job.fields import ModelSize


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a number in a run of one type."""

    weight: int
    """Bytes of a weight, and of an activation."""
    gradient: int
    """Gradients are summed in float32 at least."""
    optimizer: int
    """Two moments, and a float32 copy of what is smaller; ranks with shares of parameters keep it in their place."""


PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType(
    {"bfloat16": Precision(2, 4, 12), "float32": Precision(4, 4, 8), "float64": Precision(8, 8, 16)}
)
"""Precisions by the type of a run."""
BFLOAT16: Final = PRECISIONS["bfloat16"]

MAX_LOGITS: Final = 1 << 26
"""Logits alive at once in a backbone's loss: as in `models.backbone`, which brings torch. A test holds them equal."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many parameters a device has to do with."""

    trained: float = 0
    frozen: float = 0

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.trained + other.trained, self.frozen + other.frozen)

    def __mul__(self, factor: float) -> "Parameters":
        return Parameters(self.trained * factor, self.frozen * factor)

    def static_bytes(self, precision: Precision = BFLOAT16) -> float:
        """Bytes of weights and gradients."""
        return (self.trained + self.frozen) * precision.weight + self.trained * precision.gradient

    def optimizer_bytes(self, precision: Precision = BFLOAT16) -> float:
        """Bytes of the optimizer's states."""
        return self.trained * precision.optimizer

    def state_bytes(self, ranks: int, precision: Precision = BFLOAT16) -> float:
        """All of it; ranks that share parameters (zero2) share the optimizer's states, while weights and gradients are
        whole during a step."""
        return self.static_bytes(precision) + self.optimizer_bytes(precision) / ranks

    def dealt_bytes(self, ranks: int, gathered: "Parameters", precision: Precision = BFLOAT16) -> float:
        """All of it in shares (zero3), but for what is gathered at a time."""
        return self.state_bytes(1, precision) / ranks + gathered.static_bytes(precision)


def gathered_at_once(blocks: Parameters, layers: int, ends: Parameters) -> Parameters:
    """Two blocks of a module, and what it has besides."""
    return blocks * (2 / layers) + ends


def logit_bytes(vocab_size: int, rows: int = MAX_LOGITS, precision: Precision = BFLOAT16) -> int:
    """What the loss of so many rows takes at most: logits, the same in float32 at least, and their gradients."""
    return min(MAX_LOGITS, rows * vocab_size) * (precision.weight + 2 * precision.gradient)


@dataclass(frozen=True, slots=True)
class Block:
    """What a kind of block keeps of a row, beside queries, keys and values."""

    whole: int
    """Times the width, on every tensor-parallel rank: what goes into norms and comes out of them."""
    divided: int
    """Times the width, divided between tensor-parallel ranks: queries, and what attention gives."""
    inside: int
    """Times the width inside the MLP, also divided."""


ENCODER_BLOCK: Final = Block(whole=5, divided=2, inside=2)
GATED_BLOCK: Final = Block(whole=5, divided=2, inside=4)
"""Activations of a block of a backbone, whose MLP has a gate."""
GENERATOR_BLOCK: Final = Block(whole=16, divided=4, inside=2)
"""It keeps what its modulation multiplies, and has a second attention."""


def block_bytes(block: Block, size: ModelSize, tp: int, precision: Precision = BFLOAT16) -> float:
    """Activations that a block keeps of a row for its backward, attention without a matrix of probabilities.

    Inputs and outputs of norms are whole on every tensor-parallel rank; queries, keys, values, what attention gives and
    what is inside the MLP are divided (Korthikanti et al. 2022, section 4.2). What attention gives counts once more, as
    where it goes segment by segment.
    """
    queries, keys = size.head_size * size.heads, size.head_size * size.groups
    inside = GATED_BLOCK.inside if size.gated else block.inside
    divided = block.divided * queries + 2 * keys + inside * size.mlp_width
    return precision.weight * (block.whole * size.width + divided / tp)


def saved_bytes(block: Block, size: ModelSize, tp: int, recompute: bool, precision: Precision = BFLOAT16) -> float:
    """What all blocks of a module keep of a row from its forward to its backward: their inputs, if they compute the
    rest again. Rows with outputs of several layers are held as well."""
    row = precision.weight * size.width
    return size.layers * (row if recompute else block_bytes(block, size, tp, precision)) + size.deepstack * row
