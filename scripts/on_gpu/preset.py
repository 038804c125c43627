"""What is trained on a machine's GPUs: the largest backbone that fits, with a ViT-Huge before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataserver.planning.job.fields import MODELS, ModelSize
from trainclient.orchestrate.memory import ENCODER_BLOCK
from trainclient.orchestrate.memory import saved_bytes as bytes_of_row

BYTES_OF_PARAMETER = 18
"""Bytes of a parameter in bfloat16: weights, gradients, float32 copies and moments."""
SHARED_BYTES = 12
"""The part of these that `sharding: zero2` leaves on one of its ranks only."""
ACTIVATIONS = 0.35
"""Share of the device for activations, logits and what torch and NCCL keep."""
ENCODER = "vit-h"
MICROBATCH = 2
"""Sequences in a microbatch."""


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained on each device."""

    preset: str
    layers: int
    encoder: str = ENCODER
    seq_len: int = 4096
    sequences: int = 8
    """Sequences that each device takes in a step."""
    max_patches: int = 1024

    @property
    def parameters(self) -> int:
        """Number of parameters in both modules without embeddings of tokens: two for each two operations of a row, for
        all layers."""
        backbone, encoder = MODELS["backbone"][self.preset], MODELS["encoder"][self.encoder]
        return self.layers * _block(backbone, gated=True) + encoder.layers * _block(encoder, gated=False)

    def bytes_on(self, devices: int) -> int:
        """Bytes on each of so many devices: parameters and all that belongs to them."""
        shared = SHARED_BYTES - SHARED_BYTES // devices
        return self.parameters * (BYTES_OF_PARAMETER - shared)

    def __str__(self) -> str:
        return f"{self.preset} with {self.layers} layers and {self.encoder}, {self.parameters / 1e9:.2f}B parameters"


SIZES = tuple(Size(*pair) for pair in (("llama3-13b", 40), ("llama3-7b", 32), ("llama3-7b", 16), ("llama3-7b", 8)))
"""Sizes that are tried, the largest first."""
SMALL = Size("tiny", 4, "tiny", seq_len=256, sequences=4, max_patches=64)


def _block(size: ModelSize, *, gated: bool) -> int:
    keys = size.width // size.heads * size.groups
    return 2 * size.width * (size.width + keys) + (3 if gated else 2) * size.width * size.mlp_width


def fitting(budget_bytes: int, devices: int) -> Size | None:
    """The largest size whose parameters leave room for activations."""
    return next((s for s in SIZES if s.bytes_on(devices) <= (1 - ACTIVATIONS) * budget_bytes), None)


def memory_of_encoder(size: Size, budget_bytes: int, devices: int) -> int:
    """Bytes of a device for what the encoder keeps until its backward phase: half of what parameters leave."""
    return (budget_bytes - size.bytes_on(devices)) // 2


def job(
    size: Size,
    devices: int,
    steps: int,
    saved_bytes: int | None = None,
    recomputed: Sequence[str] = (),
    microbatch: int = MICROBATCH,
) -> dict[str, Any]:
    """Both modules on all devices. The encoder keeps the images of a round until its backward phase.

    Args:
        size: of the modules.
        devices: how many.
        steps: after which the job ends.
        saved_bytes: memory for what it keeps; a step is cut into as many rounds as that takes. By default it keeps the
            images of the whole step.
        recomputed: names of modules that compute their blocks again.
        microbatch: sequences of one.
    """
    modules: list[dict[str, Any]] = [{"name": "vision", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
    for module in modules:
        module |= {"dp": devices, "recompute": module["name"] in recomputed}
    if saved_bytes is not None:
        unit = bytes_of_row(ENCODER_BLOCK, MODELS["encoder"][size.encoder], 1, "vision" in recomputed)
        modules[0]["memory"] = {"budget_bytes": saved_bytes, "step_bytes": saved_bytes, "unit_bytes": round(unit)}
    return {
        "stream": {
            "datasets": [{"name": "pairs"}],
            "tokenizer": {"name": "bytes"},
            "sizing": {"patch": 14, "merge": 2, "max_patches": size.max_patches},
            "seq_len": size.seq_len,
            "global_batch": size.sequences * devices,
        },
        "execution": {
            "modules": modules,
            "microbatch": microbatch,
            "layout": {"kind": "colocated"},
            "end": {"steps": steps},
        },
    }


def flags(size: Size, job: Path, address: str, metrics: Path, *, small: bool) -> list[Any]:
    """Return the flags of `trainclient train` for a size."""
    shared = ["--job", job, "--servers", address, "--metrics", metrics, "--no-progress"]
    shared += ["--encoder.preset", size.encoder, "--backbone.preset", size.preset, "--backbone.layers", size.layers]
    if small:
        return [*shared, "--device", "cpu", "--peak-tflops", 1, "--threads", 1]
    sharded = ["--encoder.sharding", "zero2", "--backbone.sharding", "zero2"]
    return [*shared, *sharded, "--device", "cuda", "--dtype", "bfloat16", "--compile"]
