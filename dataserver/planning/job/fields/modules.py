"""Modules: what they compute, on how many devices, and how their items are spread."""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from dataserver.planning.job.fields.cost import Cost, ModelCost, default_cost
from dataserver.planning.job.fields.values import Modality, ModuleKind, Name, Positive, SpecModel


class BalancePolicy(StrEnum):
    """How a module's items are spread over its ranks; all but `none` even out what the ranks have to do."""

    NONE = "none"
    """Canonical order: sequences and pairs dealt out in runs, images on the rank beside that of their sequence."""
    EVEN = "even"
    """Encoder, generator: images in canonical order, dealt out in runs of equal count over all ranks."""
    LPT = "lpt"
    """Longest processing time first (Graham 1969; DistTrain, Algorithm 1)."""

    @property
    def keeps_order(self) -> bool:
        """Whether items stay in canonical order, whatever they cost."""
        return self in (BalancePolicy.NONE, BalancePolicy.EVEN)


class PackingPolicy(StrEnum):
    """How samples are packed into sequences."""

    BALANCED = "balanced"
    """Into as many sequences as there are slots, of equal backbone cost (linear and quadratic) rather than full."""
    BEST_FIT = "best_fit"
    """Best-fit decreasing: few, full sequences."""


class Memory(SpecModel):
    """Memory for activations on each device of a stage. Plans keep within it."""

    budget_bytes: Positive
    """Memory of the device that is left after parameters, gradients and optimizer states; with `recompute`, minus what
    one block of a microbatch takes while it is computed again."""
    unit_bytes: Positive
    """Memory that one patch (encoder, generator, image tower), position (encoder of audio) or token (backbone, text
    tower) takes on a device of a stage from its forward to its backward; with `recompute`, that of the inputs of
    blocks."""
    step_bytes: Positive | None = None
    """Memory that all microbatches of a step together may take on a device; at least `budget_bytes`. A step that would
    take more is cut into rounds. Only for modules that hold every microbatch until their backward phase: colocated
    encoders, and a colocated backbone before generators."""

    @property
    def units(self) -> int:
        """Patches or tokens that a device holds at once."""
        return self.budget_bytes // self.unit_bytes

    @property
    def step_units(self) -> int | None:
        """Patches or tokens of a step that a device holds at once; None where the job does not say."""
        return None if self.step_bytes is None else self.step_bytes // self.unit_bytes

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.units:
            raise ValueError(
                f"budget_bytes {self.budget_bytes} holds no unit of unit_bytes {self.unit_bytes}; raise it"
            )
        if self.step_bytes is not None and self.step_bytes < self.budget_bytes:
            raise ValueError(
                f"step_bytes is {self.step_bytes} and budget_bytes {self.budget_bytes}; a microbatch is part of its "
                "step: lower budget_bytes, or raise step_bytes"
            )
        return self


_OF_KINDS = {
    "pp": (ModuleKind.BACKBONE, ModuleKind.TOWER),
    "packing": (ModuleKind.BACKBONE,),
    "datasets": (ModuleKind.ENCODER, ModuleKind.GENERATOR),
    "modality": (ModuleKind.TOWER, ModuleKind.ENCODER),
}
"""Fields that only modules of some kinds have, beside those of all."""


class ModuleSpec(SpecModel):
    """One module, the degrees of its parallelism, and its policies."""

    name: Name
    """Name that clients ask for."""
    kind: ModuleKind
    """Role of the module: encoder, backbone, generator or tower."""
    dp: Annotated[int, Field(ge=1, le=65536)] = 1
    """Data-parallel degree: the number of ranks. Each has its own view."""
    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor-parallel degree; the processes of one rank get the same view."""
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pipeline stages; only a backbone or a tower has more than one."""
    sp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Sequence-parallel degree; the processes of one rank get the same view."""
    datasets: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Encoder, generator: the datasets whose images (audio, videos) it handles; by default those that no other module
    of the same kind and modality names."""
    modality: Modality | None = None
    """Tower: whether it reads images or text. Encoder: `audio` if it encodes audio clips, `video` if it encodes videos;
    by default images."""
    frozen: bool | None = None
    """Whether its weights are not trained. Gradients then only pass through it, to trained modules before it; if there
    are none, it has no backward at all. By default all modules are trained."""
    recompute: bool | None = None
    """Whether the backward computes each block again, so that only the inputs of blocks are held until then. By default
    nothing is computed again."""
    cost: Annotated[Cost, Field(default=None, validate_default=True)]
    """Time model, by numbers or by names; the default depends on kind and modality."""
    memory: Memory | None = None
    """Memory for activations; without it, plans assume that there is enough."""
    balance: BalancePolicy = BalancePolicy.LPT
    """How its items are spread over ranks and microbatches. A grouped backbone has no balance, because groups spread
    its sequences."""
    padded: bool = False
    """Whether the items of a microbatch are padded to the largest, so that each costs as much as that one. Every
    balance but `none` and `even` then groups items of similar size."""
    packing: Annotated[PackingPolicy | None, Field(default=None, validate_default=True)]
    """Backbone: how samples are packed into sequences, if the stream has packing; by default `balanced`."""

    @property
    def replicas(self) -> int:
        """Processes of a stage that hold the same parameters: data-parallel ranks, each with its sp."""
        return self.dp * self.sp

    @property
    def holds_samples(self) -> bool:
        """Whether its items are samples, sized in tokens (backbone, text tower); elsewhere images, in patches."""
        return self.kind is ModuleKind.BACKBONE or self.modality is Modality.TEXT

    @property
    def handles_images(self) -> bool:
        """Whether it encodes or generates the images of a backbone's samples."""
        return self.kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR)

    @property
    def reads(self) -> Modality:
        """What a module that has a modality reads."""
        return self.modality or Modality.IMAGE

    @property
    def step_units(self) -> int | None:
        """Patches or tokens of a step that a device holds at once; None where the job does not say."""
        return None if self.memory is None else self.memory.step_units

    @property
    def makes_features(self) -> bool:
        """Whether its last stage meets those of other modules, with a feature of each sample."""
        return self.kind is ModuleKind.TOWER

    @property
    def runs_backward(self) -> bool:
        """Whether it runs backwards; the module of an execution, whose costs are settled (`gradients`)."""
        return not self.frozen or self.cost.backward_percent > 0

    @field_validator("frozen", "recompute", mode="after")
    @classmethod
    def _only_if_so(cls, value: bool | None) -> bool | None:
        """A module that is not frozen, and computes nothing again, is the same whether it says so or not."""
        return value or None

    @field_validator("modality", mode="after")
    @classmethod
    def _unless_default(cls, value: Modality | None, info: ValidationInfo) -> Modality | None:
        """An encoder of images is the same whether it says so or not."""
        is_encoder = info.data.get("kind") is ModuleKind.ENCODER
        return None if is_encoder and value is Modality.IMAGE else value

    @field_validator("cost", mode="before", json_schema_input_type=Cost | ModelCost | None)
    @classmethod
    def _named_cost(cls, value: Any, info: ValidationInfo) -> Any:
        """Names become integers: a job's identity holds nothing that another release may compute differently."""
        given = info.data
        if not {"kind", "tp", "sp", "modality", "frozen", "recompute"} <= given.keys():  # one is wrong, and reported
            return value
        kind, tp, sp = (given[name] for name in ("kind", "tp", "sp"))
        if value is None:
            value = default_cost(kind, given["modality"])
        if isinstance(value, dict) and "model" in value:
            try:
                value = ModelCost.model_validate(value, strict=True)
            except ValidationError as error:
                problems = [(*e["loc"], e["msg"].removeprefix("Value error, ")) for e in error.errors()]
                raise ValueError("; ".join(": ".join(map(str, p)) for p in problems)) from None
        if not isinstance(value, ModelCost):
            return value
        if given["frozen"] or given["recompute"]:
            return value.forward_fields_of(kind, tp, sp)
        return value.fields_of(kind, tp, sp)

    @field_validator("packing", mode="after")
    @classmethod
    def _default_packing(cls, value: PackingPolicy | None, info: ValidationInfo) -> PackingPolicy | None:
        return PackingPolicy.BALANCED if value is None and info.data.get("kind") is ModuleKind.BACKBONE else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field, kinds in _OF_KINDS.items():
            value = getattr(self, field)
            if self.kind not in kinds and value not in (None, 1):
                raise ValueError(
                    f"module {self.name} ({self.kind}) has {field} {value}; only {' and '.join(kinds)} modules have "
                    "it, leave it out"
                )
        if self.balance is BalancePolicy.EVEN and not self.handles_images:
            raise ValueError(
                f"module {self.name} ({self.kind}) has balance even; only images are dealt out so, take none, which "
                "gives its ranks equal counts as well"
            )
        towers = [Modality.IMAGE, Modality.TEXT]
        if self.kind is ModuleKind.TOWER and self.modality not in towers:
            found = "no modality" if self.modality is None else f"modality {self.modality}"
            raise ValueError(f"tower {self.name} has {found}; set it to one of {[str(m) for m in towers]}")
        if self.kind is ModuleKind.ENCODER and self.modality is Modality.TEXT:
            raise ValueError(f"encoder {self.name} has modality text; image, audio and video are encoded, leave it out")
        if self.reads is Modality.VIDEO and self.padded:
            raise ValueError(f"encoder {self.name} of video is padded; frames of videos are not, leave it out")
        return self


def beside_sequences(modules: tuple[ModuleSpec, ...]) -> tuple[ModuleSpec, ...]:
    """The modules of a job whose images stay on the rank of their sequence, whatever balance is the default.

    Raises:
        ValueError: a module asks for a balance of its images, which could have no effect.
    """
    for module in modules:
        if module.handles_images and module.balance not in (BalancePolicy.LPT, BalancePolicy.NONE):
            raise ValueError(
                f"module {module.name} has balance {module.balance}, but with identity_routing its images go where "
                "their sequences are: leave balance out"
            )
    return tuple(m.model_copy(update={"balance": BalancePolicy.NONE}) if m.handles_images else m for m in modules)
