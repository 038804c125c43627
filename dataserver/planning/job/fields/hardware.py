"""Coefficients of named models on named devices, from their floating-point operations, in exact integers.

A matrix product with a weight takes two operations for each weight and row; attention takes 4 x width operations for
each layer and pair of rows (queries x keys, then probabilities x values); a causal mask leaves half of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Final, TypeVar

Value = TypeVar("Value")

LAYER_NS: Final = 10_000
"""Time of a layer beside its weights and rows: about ten kernels that begin and end, 1 us each. An assumption."""
REDUCTION_NS: Final = 15_000
"""Latency of a sum over the peers of tensor parallelism. An assumption."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the operations of a transformer depend on."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    groups: int
    """Heads of keys and values."""
    vocab_size: int = 0
    """Rows of a backbone's output head."""
    causal: bool = False
    """Whether a tower's mask hides later rows; a backbone's always does."""
    head_dim: int = 0
    """Size of a head, where heads do not make up the width; else 0."""
    gated: bool = False
    """Whether an encoder's MLP has a gate; a backbone's always has."""
    window: int = 0
    """Rows of its item that a row of a windowed layer attends to; 0: no layer has a window."""
    global_layers: int = 0
    """Layers that see whole items, where others are windowed."""
    deepstack: int = 0
    """Layers of an encoder whose outputs go to the backbone too, in wider rows; of a backbone those that take them."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.width // self.heads


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Forward time of a microbatch: a constant, and a part for each row and for each pair of rows of one item."""

    microbatch_ns: int
    linear_ps: int
    quadratic_fs: int


# The trainer makes models of these sizes (`trainclient.models.presets`).
# ViT-Huge: arXiv 2010.11929, table 1. Whisper's encoder: arXiv 2212.04356, table 1. Backbones: DistTrain (arXiv
# 2408.04275), table 2, with Llama 3's vocabulary. Towers, which the trainer does not have: OpenCLIP's ViT-H/14 (text:
# width 1024, 16 heads, 24 layers, and the causal mask of CLIP, arXiv 2103.00020, section 2.4).
MODELS: Final[Mapping[str, Mapping[str, ModelSize]]] = MappingProxyType(
    {
        "encoder": MappingProxyType(
            {
                "tiny": ModelSize(2, 64, 256, 4, 4),
                "vit-h": ModelSize(32, 1280, 5120, 16, 16),
                "whisper-large": ModelSize(32, 1280, 5120, 20, 20),
            }
        ),
        "backbone": MappingProxyType(
            {
                "tiny": ModelSize(4, 64, 192, 4, 2, 262),
                "llama3-7b": ModelSize(32, 4096, 11008, 32, 32, 128_256),
                "llama3-13b": ModelSize(40, 5120, 13824, 40, 40, 128_256),
                "llama3-70b": ModelSize(80, 8192, 28672, 64, 8, 128_256),
            }
        ),
        "generator": MappingProxyType(
            {"tiny": ModelSize(2, 64, 256, 4, 4), "dit-1b": ModelSize(26, 1536, 6144, 24, 24)}
        ),
        "tower": MappingProxyType(
            {
                "tiny": ModelSize(2, 64, 256, 4, 4),
                "vit-h": ModelSize(32, 1280, 5120, 16, 16),
                "clip-text-h": ModelSize(24, 1024, 4096, 16, 16, causal=True),
            }
        ),
    }
)

# Dense bf16 peak of the SXM boards in 10^9 operations per second, from NVIDIA's data sheets: the A800 computes like the
# A100, the H200 like the H100.
PEAK_GIGAFLOPS: Final[Mapping[str, int]] = MappingProxyType({"a800": 312_000, "h100": 989_400, "h200": 989_400})

# Of the same data sheets: bytes in a nanosecond (GB/s) between a device and its own memory.
MEMORY_GB_S: Final[Mapping[str, int]] = MappingProxyType({"a800": 2_039, "h100": 3_350, "h200": 4_800})


def linear_flops(kind: str, size: ModelSize) -> int:
    """Forward operations of one row (patch or token): twice the weights that it is multiplied with.

    Left out, a few percent for the large models and images of hundreds of patches: an encoder's patch embedding and
    merger; a generator's ends, its modulation, and the keys and values of its conditions, whose rows are not patches.
    """
    width = size.width
    attention = 2 * width * size.head_size * (size.heads + size.groups)
    if kind == "backbone":  # a gated MLP, and the output head
        return 2 * (size.layers * (attention + 3 * width * size.mlp_width) + width * size.vocab_size)
    queries = 2 * width * width if kind == "generator" else 0  # into and out of the attention to the conditions
    return 2 * size.layers * (attention + queries + (3 if size.gated else 2) * width * size.mlp_width)


def pair_flops(kind: str, size: ModelSize) -> int:
    """Forward operations of attention for each of the n^2 pairs of an item's rows; a causal mask leaves half.

    Backbones have one, and CLIP's text tower; image towers see all pairs. Windowed layers have fewer (`seen_rows`).
    """
    return 4 * size.layers * size.heads * size.head_size // (2 if _is_causal(kind, size) else 1)


def seen_rows(kind: str, size: ModelSize) -> int:
    """How many rows of an item its pairs count for each row in windowed layers, at most; a causal mask leaves half."""
    return size.window * (2 if _is_causal(kind, size) else 1)


def _is_causal(kind: str, size: ModelSize) -> bool:
    return kind == "backbone" or size.causal


def fixed_ns(kind: str, size: ModelSize, device: str, degree: int = 1) -> int:
    """Forward time of a microbatch that no row causes, rounded up: launching kernels, and reading each weight once.

    A weight has two bytes (bf16), so all of them have as many bytes as a row takes operations. That reading hides
    behind no computing is an assumption, which makes short microbatches slower: n rows reach n / (n + h) of the speed
    of many, where reading takes as long as computing h rows. On an H100 at 40 % of its peak h is 118. A profile or
    `dataserver fit` finds the time that a device takes.

    Args:
        kind: encoder, backbone, generator or tower.
        size: of the module.
        device: a name in `MEMORY_GB_S`.
        degree: devices that share each weight (tensor parallelism).
    """
    return size.layers * LAYER_NS - (-linear_flops(kind, size) // (MEMORY_GB_S[device] * degree))


def peer_sums(kind: str, size: ModelSize) -> int:
    """Sums over the peers of tensor parallelism in a forward: behind attention, to conditions too, and the MLP."""
    return size.layers * (3 if kind == "generator" else 2)


def coefficients(
    kind: str,
    model: str,
    device: str,
    efficiency: Fraction,
    degree: int = 1,
    attention: Fraction | None = None,
    copies: int = 1,
) -> Coefficients:
    """Coefficients of a named model, rounded up.

    Args:
        kind: encoder, backbone, generator or tower.
        model: a name in `MODELS[kind]`.
        device: a name in `PEAK_GIGAFLOPS`.
        efficiency: share of the device's peak that is reached, in (0, 1].
        degree: devices that share each row's work (tensor x sequence parallelism).
        attention: share of the peak that attention reaches, in (0, 1], where it differs from all other work.
        copies: that these devices have of the weights (sequence parallelism).

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    size = entry_named(kind, MODELS[kind], model)
    rate = entry_named("device", PEAK_GIGAFLOPS, device) * degree  # operations per nanosecond
    return Coefficients(
        microbatch_ns=fixed_ns(kind, size, device, degree // copies),
        linear_ps=-(-linear_flops(kind, size) * 1_000 // (efficiency * rate)),
        quadratic_fs=-(-pair_flops(kind, size) * 1_000_000 // ((attention or efficiency) * rate)),
    )


def backward_percent(*, frozen: bool, input_gradient: bool, checkpoint: bool) -> int:
    """Backward time in percent of the forward time.

    The gradient of the data costs a forward, that of the weights another. A frozen module needs the first alone, and
    not even that when nothing before it is trained. Activation checkpointing computes the forward again.
    """
    gradients = (100 if input_gradient else 0) if frozen else 200
    return gradients + 100 if checkpoint and gradients else gradients


def entry_named(what: str, known: Mapping[str, Value], name: str) -> Value:
    """The entry of this name; ValueError, which lists the others, if there is none."""
    if name not in known:
        raise ValueError(f"there is no {what} named {name!r}; choose one of {', '.join(sorted(known))}")
    return known[name]
