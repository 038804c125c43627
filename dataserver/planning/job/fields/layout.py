"""What the layouts of jobs have in common: how modules share the devices and the time of a step.

Each layout has a folder beside this package, whose `options` derive from the classes here.
"""

from abc import abstractmethod
from collections.abc import Iterable
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Protocol, Self

from pydantic import Field, model_validator

from dataserver.planning.job.fields.end import End
from dataserver.planning.job.fields.hardware import ModelSize
from dataserver.planning.job.fields.modules import ModuleSpec
from dataserver.planning.job.fields.plan_limits import Extreme
from dataserver.planning.job.fields.stream import Stream
from dataserver.planning.job.fields.values import ModuleKind, SpecModel

ExtraInFlight = Annotated[int, Field(ge=0, le=1024)]


class OrderPolicy(StrEnum):
    """How a rank's microbatches are ordered."""

    DISTTRAIN = "disttrain"
    """DistTrain, Algorithm 2, kept only where the simulator finds the step faster than in the order before it."""
    SEARCH = "search"
    """Bounded search over assignment, composition and order of all microbatches together, scored by the simulator and
    started from the best of the others."""
    NONE = "none"
    """As they come: the baseline."""


class Schedule(StrEnum):
    """What a pipeline stage does in a step."""

    ONE_F_ONE_B = "1f1b"
    """Forward and backward in turn (PipeDream-Flush): few microbatches in flight."""
    GPIPE = "gpipe"
    """All forwards, then all backwards: every microbatch in flight, as far as memory goes."""
    INTERLEAVED = "interleaved"
    """1F1B over several model chunks in each stage of the backbone (Narayanan et al. 2021, section 2.2)."""


class ExecutionParts(Protocol):
    """What of an execution a layout has a say in."""

    @property
    def modules(self) -> tuple[ModuleSpec, ...]:
        """Modules of the job, in its order."""

    @property
    def backbone(self) -> ModuleSpec:
        """The backbone; layouts of towers have none."""

    def of_kind(self, kind: ModuleKind) -> tuple[ModuleSpec, ...]:
        """The modules of that kind, in the order of the job."""

    @property
    def microbatch(self) -> int:
        """Sequences of one microbatch of one backbone rank, at most."""

    @property
    def end(self) -> End:
        """The step or epoch after which the job ends."""

    @property
    def modality_parity(self) -> bool | None:
        """Whether all backbone ranks of a wave have images or none has; None where nothing is asked."""

    @property
    def identity_routing(self) -> bool | None:
        """Whether images stay on the rank of their sequence; None where nothing is asked."""


class LayoutOptions(SpecModel):
    """The part of a job that belongs to its layout; `kind` names it, and the folder that plans it."""

    @abstractmethod
    def check_modules(self, execution: ExecutionParts) -> None:
        """Refuse modules that this layout cannot run.

        Raises:
            ValueError: what was found, and what to change.
        """

    @abstractmethod
    def check_stream(self, stream: Stream, execution: ExecutionParts) -> None:
        """Refuse a stream that the modules cannot train on in this layout.

        Raises:
            ValueError: what was found, and what to change.
        """

    def check_images(self, execution: ExecutionParts) -> None:
        """Refuse what is asked about the ranks of images (`modality_parity`, `identity_routing`), unless overridden.

        Raises:
            ValueError: what was found, and what to change.
        """
        asked = [f for f in ("modality_parity", "identity_routing") if getattr(execution, f)]
        if asked:
            raise ValueError(
                f"found {' and '.join(asked)}, which only a pipelined layout plans: leave layout out, which is "
                f"pipelined then, or leave {' and '.join(asked)} out"
            )

    def check_model(self, module: ModuleSpec, name: str, size: ModelSize) -> None:
        """Refuse a model that a module's cost names, unless the module can be run so; by default all can.

        Raises:
            ValueError: what was found, and what to change.
        """

    @property
    def num_chunks(self) -> int:
        """Model chunks of each stage."""
        return 1

    @property
    def group_degrees(self) -> tuple[int, ...]:
        """Degrees of the groups of backbone ranks that may share sequences, ascending; none where each has its own."""
        return ()

    def blocks(self, execution: ExecutionParts) -> int:
        """Model chunks of all stages of all ranks: each runs every microbatch forward and backward."""
        return sum(m.dp * m.pp for m in execution.modules) * self.num_chunks

    @abstractmethod
    def num_microbatches(self, stream: Stream, execution: ExecutionParts) -> int:
        """Microbatches of each rank that a full step has at least."""

    def step_size(self, stream: Stream, execution: ExecutionParts) -> dict[str, int]:
        """How large a step is, by fields of `PlanLimits`."""
        microbatches = self.num_microbatches(stream, execution)
        stages = sum(m.pp for m in execution.modules) * self.num_chunks
        return {
            "step_sequences": stream.global_batch,
            "step_microbatches": microbatches,
            "step_operations": 2 * microbatches * self.blocks(execution),
            "step_passes": stream.global_batch * stages,
        }

    def extremes(self, stream: Stream, execution: ExecutionParts) -> Iterable[Extreme]:  # noqa: ARG002
        """The largest sums and products that only this layout forms."""
        return ()

    def keeps_step(self, execution: ExecutionParts, module: ModuleSpec) -> bool:  # noqa: ARG002
        """Whether a module keeps every microbatch of a step until the last one is forward."""
        return False


class BackboneOptions(LayoutOptions):
    """Options of a layout with one backbone, any number of encoders and generators, and no tower."""

    def check_modules(self, execution: ExecutionParts) -> None:
        """Refuse modules that the layout cannot run."""
        kinds = [m.kind for m in execution.modules]
        if ModuleKind.TOWER in kinds or kinds.count(ModuleKind.BACKBONE) != 1:
            raise ValueError(
                f"found modules of kinds {[str(k) for k in kinds]}; a layout other than contrastive has one backbone, "
                "any number of encoders and generators, and no tower"
            )

    def check_stream(self, stream: Stream, execution: ExecutionParts) -> None:
        """Refuse a contrastive stream, generation without a generator, and a batch that does not divide."""
        if stream.contrastive_batch is not None:
            raise ValueError(
                f"stream.contrastive_batch is {stream.contrastive_batch}; only a contrastive layout has it, leave it "
                "out or set layout.kind to contrastive"
            )
        ratio = stream.generation.ratio
        if Fraction(ratio) > 0 and not execution.of_kind(ModuleKind.GENERATOR):
            raise ValueError(
                f"generation.ratio is {ratio} but the job has no module of kind generator; add one, or set it to 0"
            )
        backbone = execution.backbone
        self.check_batch(stream, backbone, execution.microbatch)
        if backbone.padded and stream.packing.enabled:
            raise ValueError(
                f"module {backbone.name} is padded but the stream packs samples into sequences; a backbone pads or "
                "packs (packed sequences need no padding): set stream.packing.enabled to false, or leave padded out"
            )

    def check_batch(self, stream: Stream, backbone: ModuleSpec, microbatch: int) -> None:
        """Refuse a global batch that leaves ranks with unequal numbers of sequence slots."""
        slots = backbone.dp * microbatch
        if stream.global_batch % slots:
            raise ValueError(
                f"global_batch {stream.global_batch} does not divide into dp {backbone.dp} x microbatch "
                f"{microbatch} = {slots} sequences; use a multiple of {slots}"
            )

    def num_microbatches(self, stream: Stream, execution: ExecutionParts) -> int:
        """Number of microbatches if all sequences are full."""
        return stream.global_batch // (execution.backbone.dp * execution.microbatch)


class WaveOptions(BackboneOptions):
    """Options of a layout whose modules, on devices of their own, work wave by wave."""

    schedule: Schedule = Schedule.ONE_F_ONE_B
    """The order in which each stage runs its forwards and backwards."""
    extra_in_flight: ExtraInFlight | None = None
    """How many microbatches beyond those of 1F1B each stage but the last may hold, within its memory: less waiting,
    more activations. By default none, or 4 if every module states its memory. A plan tries 0, 1, 2, 4 and 8, up to this
    limit, and takes the fastest."""
    order: OrderPolicy = OrderPolicy.SEARCH
    """Order of microbatches within a backbone rank."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule is not Schedule.ONE_F_ONE_B and self.extra_in_flight:
            raise ValueError(
                f"schedule {self.schedule} has extra_in_flight {self.extra_in_flight}; only 1f1b leaves a choice, "
                "leave it out"
            )
        return self
