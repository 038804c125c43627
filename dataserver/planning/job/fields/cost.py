"""Time models of modules, by numbers or by names."""

from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import Field, model_validator

from dataserver.planning.job.fields.hardware import backward_percent, coefficients
from dataserver.planning.job.fields.values import DecimalString, Modality, ModuleKind, Name, SpecModel


class Cost(SpecModel):
    """Time of one microbatch in a whole module: the sum over its items of linear n + quadratic n^2, and a constant.

    An item is an image of n patches (encoder, generator, image tower), a clip of n positions (encoder of audio; 50 a
    second) or a sample of n tokens (backbone, tower of texts).
    """

    microbatch_ns: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Nanoseconds of a forward pass that do not depend on its items."""
    linear_ps: Annotated[int, Field(ge=0, le=10**11)]
    """Picoseconds of a forward pass for each patch or token."""
    quadratic_fs: Annotated[int, Field(ge=0, le=10**8)]
    """Femtoseconds of a forward pass for each pair of patches or tokens of one item (attention)."""
    window: Annotated[int, Field(ge=1, le=2**22)] | None = None
    """Most patches or tokens of an item to which each of them attends; only such pairs count. By default all of the
    item; for an encoder whose images are cut into tiles, the patches of a tile."""
    backward_percent: Annotated[int, Field(ge=0, le=1000)] = 200
    """Backward time in percent of the forward time. For a module with `frozen` the default is 100, or 0 if no gradient
    passes through it; with `recompute` the default is 100 more."""


class ModelCost(SpecModel):
    """A cost by the names of a model and a device. When a job is read, it becomes the integers of `Cost`."""

    model: Name
    """A named model of the module's kind: vit-h, whisper-large; llama3-7b, llama3-13b, llama3-70b; dit-1b; for towers
    vit-h and clip-text-h; for every kind tiny."""
    device: Name
    """Device that it runs on: a800, h100 or h200. The work of a rank is divided by the module's tp x sp."""
    efficiency: DecimalString
    """Share of the device's dense bf16 peak that is reached, in (0, 1]; if there is `attention_efficiency`, by
    everything but attention."""
    attention_efficiency: DecimalString | None = None
    """Share of the peak that attention reaches (`quadratic_fs`), in (0, 1]. It is usually lower than that of products
    with weights. By default `efficiency`."""
    frozen: bool = False
    """Whether the weights are not trained. This changes only the time; `frozen` of the module freezes it, and then
    neither this field nor the next may be given."""
    input_gradient: bool = True
    """Whether a module before this frozen one is trained, so that gradients must pass through it. Nothing comes before
    encoders and towers."""
    checkpoint: bool = False
    """Whether activations are computed again in the backward pass. This changes only the time; `recompute` of the
    module does it, and then this field may not be given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("efficiency", "attention_efficiency"):
            value = getattr(self, name)
            if value is not None and not 0 < Fraction(value) <= 1:
                raise ValueError(f"{name} is {value}; a value in (0, 1] is required")
        return self

    def fields_of(self, kind: ModuleKind, tp: int, sp: int = 1) -> dict[str, int]:
        """The fields of the `Cost` of a module of that kind, whose work tp x sp devices share, and whose weights tp.

        Raises:
            ValueError: an unknown name.
        """
        attention = None if self.attention_efficiency is None else Fraction(self.attention_efficiency)
        found = coefficients(kind, self.model, self.device, Fraction(self.efficiency), tp * sp, attention, sp)
        backward = backward_percent(
            frozen=self.frozen,
            input_gradient=self.input_gradient and kind not in (ModuleKind.ENCODER, ModuleKind.TOWER),
            checkpoint=self.checkpoint,
        )
        return {**asdict(found), "backward_percent": backward}

    def forward_fields_of(self, kind: ModuleKind, tp: int, sp: int = 1) -> dict[str, int]:
        """`fields_of` without `backward_percent`, for a module that says itself what its backward does.

        Raises:
            ValueError: an unknown name, or fields that say it here too.
        """
        twice = sorted(self.model_fields_set & {"frozen", "input_gradient", "checkpoint"})
        if twice:
            raise ValueError(
                f"{' and '.join(twice)} of the cost: frozen and recompute of the module say what its backward does; "
                "leave it out"
            )
        found = self.fields_of(kind, tp, sp)
        del found["backward_percent"]
        return found


def _default(model: str) -> ModelCost:
    return ModelCost.model_construct(model=model, device="h100", efficiency="0.4")


DEFAULT_COSTS: Mapping[ModuleKind, ModelCost] = MappingProxyType(
    {
        ModuleKind.ENCODER: _default("vit-h"),
        ModuleKind.BACKBONE: _default("llama3-7b"),
        ModuleKind.GENERATOR: _default("dit-1b"),
        ModuleKind.TOWER: _default("vit-h"),
    }
)


_TEXT_TOWER = _default("clip-text-h")
_AUDIO_ENCODER = _default("whisper-large")


def default_cost(kind: ModuleKind, modality: Modality | None) -> ModelCost:
    """The cost of a module that states none: for towers the two of OpenCLIP's ViT-H/14; for audio Whisper's encoder."""
    if modality is Modality.AUDIO:
        return _AUDIO_ENCODER
    return _TEXT_TOWER if modality is Modality.TEXT else DEFAULT_COSTS[kind]
