"""The whole specification of a job: a stream and its execution; and the layouts that a job can have."""

from enum import StrEnum
from typing import Annotated, Final, Self, TypeVar

import numpy as np
from pydantic import Field, ValidationInfo, field_validator, model_validator

from dataserver.planning import I64
from dataserver.planning.job.fields import (
    PLAN_LIMITS,
    End,
    LayoutOptions,
    Modality,
    ModuleKind,
    ModuleSpec,
    Positive,
    SpecModel,
    Stream,
    Transfer,
    beside_sequences,
    with_backwards,
    without_backwards,
)
from dataserver.planning.layouts.colocated.options import ColocatedOptions
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions
from dataserver.planning.layouts.grouped.options import GroupedOptions
from dataserver.planning.layouts.pipelined.options import PipelinedOptions

SUPPORTED_PLAN_VERSIONS: Final = frozenset(PLAN_LIMITS)

AnyLayout = PipelinedOptions | GroupedOptions | ColocatedOptions | ContrastiveOptions
"""The registry of layouts. A layout's folder has its options, named here, and its functions (`interface.layout_of`)."""

Options = TypeVar("Options", bound=LayoutOptions)


class ValidityPolicy(StrEnum):
    """What a backbone's views say of samples with images."""

    EXACT = "exact"
    """Whether their images can be decoded; the server decodes them first. For trainers without encoder ranks."""


class Execution(SpecModel):
    """How the job runs; any execution of one stream trains on the same samples in the same steps."""

    modality_parity: bool | None = None
    """Pipelined, one encoder: whether in every wave all backbone ranks have images or none has. For trainers whose
    encoder has collectives, which would wait for ranks that do not run it. If a step's data do not allow this, the plan
    says so, and so does the header of each such microbatch. By default it is not required."""
    identity_routing: bool | None = None
    """Pipelined, without generators: whether images stay on the rank of their sequence, which runs encoders and the
    first stage of the backbone in turn. For trainers whose ranks exchange no rows. Encoders must then have the degrees
    of the backbone; their balance is `none`. By default each module has its own devices."""
    modules: Annotated[tuple[ModuleSpec, ...], Field(min_length=1, max_length=64)]
    """The modules: one backbone with any number of encoders and generators, or only towers."""
    layout: Annotated[AnyLayout, Field(discriminator="kind")] = PipelinedOptions.model_construct()
    """How the modules share devices and time."""
    microbatch: Annotated[int, Field(ge=1, le=65536)] = 1
    """Most sequences in one microbatch of one backbone rank; there are fewer if the memory of a module requires it."""
    transfers: Annotated[tuple[Transfer, ...], Field(min_length=1, max_length=64)] | None = None
    """How long rows travel between modules and between stages, each pair once; for pairs that are not named, transfers
    take no time."""
    end: End
    """The step or epoch after which the job ends."""
    plan_version: Positive = 8
    """Version of the rules that turn a step's samples into a plan, and of the limits of a step: 5 to 8, others are
    refused. In version 6 the search for a pipelined plan ends where it gains next to nothing; in version 7 it improves
    many ranks at once, and more memory makes fewer plans slower; in version 8 a few ranks of many microbatches are
    also searched from even orders, and again more memory makes fewer plans slower. All take at most 131,072 sequences
    and, on average, samples; 16,384 microbatches of each rank; 2^20 sequences x stages; 2^21 forwards and backwards of
    all ranks; colocated 2^24 pairs of ranks, grouped 8,192 sequences; and times that add up to less than 2^62 ns in a
    step.
    A job beyond a limit is refused by the limit's name (docs/planning.md)."""
    validity: ValidityPolicy | None = None
    """What the views of samples say about their validity. By default nothing that requires decoding: only the ranks
    that get the images know that. Samples, order and denominators are the same."""

    @field_validator("modality_parity", "identity_routing", mode="after")
    @classmethod
    def _only_if_so(cls, value: bool | None) -> bool | None:
        """A job that does not ask for something is the same whether it says so or not."""
        return value or None

    @field_validator("modules", mode="after")
    @classmethod
    def _settled(cls, value: tuple[ModuleSpec, ...], info: ValidationInfo) -> tuple[ModuleSpec, ...]:
        return with_backwards(beside_sequences(value) if info.data.get("identity_routing") else value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [m.name for m in self.modules]
        if len(set(names)) < len(names):
            raise ValueError(f"module names {names} are not unique; give each module a name of its own")
        self.layout.check_modules(self)
        self.layout.check_images(self)
        for module in self.modules:
            if module.step_units is not None and not self.layout.keeps_step(self, module):
                raise ValueError(
                    f"module {module.name} has memory.step_bytes, but it never keeps a whole step; only encoders of a "
                    "colocated layout do, and its backbone before generators, if they are trained: leave it out"
                )
        self._check_transfers()
        return self

    def _check_transfers(self) -> None:
        """Every transfer is between modules, or stages, that exchange rows, and named once."""
        pairs, named = self.exchanging, [(t.source, t.target) for t in self.transfers or ()]
        for transfer, pair in zip(self.transfers or (), named, strict=True):
            for name in pair:
                self.module(name)
            if pair not in pairs:
                found = ", ".join(f"{source} to {target}" for source, target in pairs) or "none"
                raise ValueError(f"{transfer.name} moves nothing; there are {found}: correct it, or leave it out")
            if named.count(pair) > 1:
                raise ValueError(f"{transfer.name} is there {named.count(pair)} times; name each pair once")

    @property
    def exchanging(self) -> tuple[tuple[str, str], ...]:
        """Source and target of all rows that move: from encoders to the backbone, on to generators, between stages."""
        backbones, generators = self.of_kind(ModuleKind.BACKBONE), self.of_kind(ModuleKind.GENERATOR)
        encoders = () if self.identity_routing else self.of_kind(ModuleKind.ENCODER)
        into = [(m.name, b.name) for b in backbones for m in encoders]
        onward = [(b.name, m.name) for b in backbones for m in generators]
        return (*into, *onward, *((m.name, m.name) for m in self.modules if m.pp > 1))

    def transfer(self, source: str, target: str) -> Transfer | None:
        """The transfer between two modules, or the stages of one; None where it takes no time."""
        return next((t for t in self.transfers or () if (t.source, t.target) == (source, target)), None)

    def module(self, name: str) -> ModuleSpec:
        """The module of that name; ValueError names the ones there are."""
        for module in self.modules:
            if module.name == name:
                return module
        raise ValueError(f"module {name!r} is not in the job; it has {[m.name for m in self.modules]}")

    def of_kind(self, kind: ModuleKind) -> tuple[ModuleSpec, ...]:
        """The modules of that kind, in the order of the job."""
        return tuple(m for m in self.modules if m.kind is kind)

    def options(self, kind: type[Options]) -> Options:
        """The layout's options, for the layout that they belong to; TypeError in another one."""
        if not isinstance(self.layout, kind):
            raise TypeError(f"found a {self.layout.kind} layout where {kind.__name__} are needed")
        return self.layout

    @property
    def by_depth(self) -> tuple[ModuleSpec, ...]:
        """The modules in the order in which samples pass them: encoders, backbone, generators; towers as they come."""
        return tuple(m for kind in ModuleKind for m in self.of_kind(kind))

    @property
    def depths(self) -> dict[str, I64]:
        """For each module int64 [pp]: place of its stages in the joined pipeline, the same for modules of a kind."""
        if self.identity_routing:
            return {m.name: np.arange(m.pp) for m in self.modules}
        first, found = 0, {}
        for kind in ModuleKind:
            modules = self.of_kind(kind)
            for module in modules:
                found[module.name] = first + np.arange(module.pp)
            first += max((m.pp for m in modules), default=0)
        return found

    @property
    def backbone(self) -> ModuleSpec:
        """The backbone, which every layout but the contrastive one has."""
        return next(m for m in self.modules if m.kind is ModuleKind.BACKBONE)


class JobSpec(SpecModel):
    """A whole job: which samples its steps hold, and how they are run."""

    stream: Stream
    """Which samples each step holds."""
    execution: Execution
    """How the samples are run; may change when a run resumes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_datasets()
        self.execution.layout.check_stream(self.stream, self.execution)
        return self._with_windows()

    def _with_windows(self) -> Self:
        """The cost of encoders says that the patches of a tile attend to each other alone."""
        sizing = self.stream.sizing
        if sizing.tiles is None or sizing.side is None:
            return self
        window = {"window": (sizing.side // sizing.patch) ** 2}
        modules = tuple(
            m.model_copy(update={"cost": m.cost.model_copy(update=window)})
            if m.kind is ModuleKind.ENCODER and m.reads is Modality.IMAGE and m.cost.window is None
            else m
            for m in self.execution.modules
        )
        return self.model_copy(update={"execution": self.execution.model_copy(update={"modules": modules})})

    @property
    def forward_only(self) -> "JobSpec":
        """The same samples without any training: all modules are frozen, and their programs hold forwards alone."""
        modules = without_backwards(self.execution.modules)
        return self.model_copy(update={"execution": self.execution.model_copy(update={"modules": modules})})

    def _check_datasets(self) -> None:
        """Every dataset that a module names is there, and named by one module of a kind."""
        known = {d.name for d in self.stream.datasets}
        reading = ((ModuleKind.ENCODER, reads) for reads in (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO))
        for kind, reads in (*reading, (ModuleKind.GENERATOR, Modality.IMAGE)):
            modules = [m for m in self.execution.of_kind(kind) if m.reads is reads]
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

    def module_of_dataset(self, kind: ModuleKind, reads: Modality = Modality.IMAGE) -> tuple[ModuleSpec | None, ...]:
        """For each dataset of the stream the module of a kind that handles its images (clips, videos), if any does."""
        modules = [m for m in self.execution.of_kind(kind) if m.reads is reads]
        rest = next((m for m in modules if m.datasets is None), None)
        return tuple(
            next((m for m in modules if dataset.name in (m.datasets or ())), rest) for dataset in self.stream.datasets
        )
