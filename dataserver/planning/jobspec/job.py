"""The whole specification: a stream and its execution."""

from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Self

from pydantic import Field, model_validator

from dataserver.planning.jobspec.layouts import ColocatedLayout, ContrastiveLayout, Layout, PipelineLayout
from dataserver.planning.jobspec.modules import ModuleSpec
from dataserver.planning.jobspec.stream import Stream
from dataserver.planning.jobspec.values import ModuleKind, Positive, SpecModel

SUPPORTED_PLAN_VERSIONS = frozenset({1})


class LastStep(StrEnum):
    """What becomes of a last step that has fewer samples than the others."""

    PAD = "pad"
    """It is served, with empty slots."""
    DROP = "drop"
    """It is left out."""


class End(SpecModel):
    """When the job ends: exactly one of `steps` and `passes`."""

    steps: Positive | None = None
    """Number of steps."""
    passes: Positive | None = None
    """Passes that every dataset completes; in a mixture the smaller ones begin further passes meanwhile."""
    last: LastStep = LastStep.PAD
    """The last short step of a job that ends with `passes`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.passes is None):
            raise ValueError("exactly one of end.steps and end.passes is required")
        return self


class ValidityPolicy(StrEnum):
    """What a backbone's views say of samples with images."""

    EXACT = "exact"
    """Whether their images can be decoded; the server decodes them first. For trainers without encoder ranks."""


class Execution(SpecModel):
    """How the job runs; any execution of one stream trains on the same samples in the same steps."""

    modules: Annotated[tuple[ModuleSpec, ...], Field(min_length=1, max_length=64)]
    """The modules: one backbone with any number of encoders and generators, or towers alone."""
    layout: Layout = PipelineLayout()
    """How the modules share devices and time."""
    microbatch: Annotated[int, Field(ge=1, le=65536)] = 1
    """Sequences of one microbatch of one backbone rank, at most; fewer where the memory of a module asks for it."""
    end: End
    """End of the job."""
    plan_version: Positive = 1
    """Version of the rules that turn a step's samples into a plan."""
    validity: ValidityPolicy | None = None
    """What the views of samples say of their validity; by default nothing that takes decoding, which the ranks that get
    the images know. Samples, order and denominators are the same."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [m.name for m in self.modules]
        if len(set(names)) < len(names):
            raise ValueError(f"module names {names} are not unique; give each module a name of its own")
        kinds = [m.kind for m in self.modules]
        towers = kinds.count(ModuleKind.TOWER)
        if isinstance(self.layout, ContrastiveLayout):
            if towers < max(2, len(kinds)) or self.microbatch != 1:
                raise ValueError(
                    f"found modules of kinds {[str(k) for k in kinds]} and microbatch {self.microbatch}; a contrastive "
                    "layout has two towers or more, nothing else, and no microbatch (layout.microbatches says it)"
                )
            return self
        if towers or kinds.count(ModuleKind.BACKBONE) != 1:
            raise ValueError(
                f"found modules of kinds {[str(k) for k in kinds]}; a {self.layout.kind} layout has one backbone, any "
                "number of encoders and generators, and no tower"
            )
        self._check_groups()
        if isinstance(self.layout, ColocatedLayout):
            self._check_colocated()
        return self

    def _check_groups(self) -> None:
        if self.backbone.sequence_groups is None:
            return
        plain = isinstance(self.layout, PipelineLayout) and self.layout.chunks == 1
        if not plain or self.microbatch != 1:
            raise ValueError(
                f"module {self.backbone.name} has sequence_groups in a {self.layout.kind} layout with microbatch "
                f"{self.microbatch}; groups need a pipeline layout of single chunks and decide microbatches "
                "themselves: leave microbatch out"
            )

    def _check_colocated(self) -> None:
        degrees = {m.name: (m.dp, m.tp, m.sp, m.pp) for m in self.modules}
        if len(set(degrees.values())) > 1 or self.backbone.pp > 1:
            raise ValueError(
                f"modules have (dp, tp, sp, pp) {degrees}; colocated modules need the same degrees and pp 1, since "
                "every rank runs them all"
            )

    def module(self, name: str) -> ModuleSpec:
        """The module of that name; ValueError names the ones there are."""
        for module in self.modules:
            if module.name == name:
                return module
        raise ValueError(f"module {name!r} is not in the job; it has {[m.name for m in self.modules]}")

    def of_kind(self, kind: ModuleKind) -> tuple[ModuleSpec, ...]:
        """The modules of that kind, in the order of the job."""
        return tuple(m for m in self.modules if m.kind is kind)

    @property
    def backbone(self) -> ModuleSpec:
        """The backbone, which every layout but the contrastive one has."""
        return next(m for m in self.modules if m.kind is ModuleKind.BACKBONE)


class JobSpec(SpecModel):
    """A whole job."""

    stream: Stream
    """Which samples each step holds."""
    execution: Execution
    """How they are run."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_datasets()
        contrastive = isinstance(self.execution.layout, ContrastiveLayout)
        if contrastive is (self.stream.contrastive_batch is None):
            raise ValueError(
                f"layout is {self.execution.layout.kind} and stream.contrastive_batch is "
                f"{self.stream.contrastive_batch}; a contrastive layout needs it, no other may have it"
            )
        if self.stream.contrastive_batch is not None:
            self._check_towers(self.stream.contrastive_batch)
            return self
        ratio = self.stream.generation.ratio
        if Fraction(ratio) > 0 and not self.execution.of_kind(ModuleKind.GENERATOR):
            raise ValueError(
                f"generation.ratio is {ratio} but the job has no module of kind generator; add one, or set it to 0"
            )
        backbone = self.execution.backbone
        slots = backbone.dp * self.execution.microbatch
        if self.stream.global_batch % slots and backbone.sequence_groups is None:
            raise ValueError(
                f"global_batch {self.stream.global_batch} does not divide into dp {backbone.dp} x microbatch "
                f"{self.execution.microbatch} = {slots} sequences; use a multiple of {slots}"
            )
        if backbone.padded and self.stream.packing.enabled:
            raise ValueError(
                f"module {backbone.name} is padded but the stream packs samples into sequences; a backbone pads or "
                "packs (packed sequences need no padding): set stream.packing.enabled to false, or leave padded out"
            )
        return self

    def _check_datasets(self) -> None:
        """Every dataset that a module names is there, and named by one module of a kind."""
        known = {d.name for d in self.stream.datasets}
        for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR):
            modules = self.execution.of_kind(kind)
            named = [name for m in modules for name in m.datasets or ()]
            if len(set(named)) < len(named) or not known.issuperset(named):
                raise ValueError(
                    f"modules of kind {kind} name datasets {named}; each must be one of {sorted(known)} and named once"
                )
            rest = [m.name for m in modules if m.datasets is None]
            if len(rest) > 1:
                raise ValueError(
                    f"modules {rest} of kind {kind} name no datasets; all but one must say whose images they handle"
                )
            if rest and known == set(named):
                raise ValueError(
                    f"module {rest[0]} of kind {kind} handles nothing, since others name all datasets {sorted(known)}; "
                    "leave it out, or leave one of them to it"
                )

    def _check_towers(self, batch: int) -> None:
        if self.execution.end.passes is not None and self.execution.end.last is LastStep.PAD:
            raise ValueError(
                "end.last is pad; a short contrastive batch would have fewer negatives, set end.last to drop"
            )
        layout = self.execution.layout
        count = layout.microbatches if isinstance(layout, ContrastiveLayout) else 1
        for tower in self.execution.modules:
            if batch % (tower.dp * count):
                raise ValueError(
                    f"contrastive_batch {batch} does not divide into dp {tower.dp} of {tower.name} x layout."
                    f"microbatches {count}; use a multiple of {tower.dp * count}"
                )

    def module_of_dataset(self, kind: ModuleKind) -> tuple[ModuleSpec | None, ...]:
        """For each dataset of the stream the module of a kind that handles its images, if there is one."""
        modules = self.execution.of_kind(kind)
        rest = next((m for m in modules if m.datasets is None), None)
        return tuple(
            next((m for m in modules if dataset.name in (m.datasets or ())), rest) for dataset in self.stream.datasets
        )
