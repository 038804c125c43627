"""How modules share the devices and the time of a step."""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dataserver.planning.jobspec.values import Natural, SpecModel

InFlight = Annotated[int, Field(ge=0, le=1024)]


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


class ContrastiveSchedule(StrEnum):
    """What the stages of a tower do around the barrier."""

    BATCH_SYNC = "batch_sync"
    """One group after the other (DISTMM, section 4.3)."""
    DISTMM_PIPE = "distmm_pipe"
    """The next group's forwards fill the barrier's gap (DISTMM, section 4.4)."""


class PipelineLayout(SpecModel):
    """Modules on devices of their own: encoders feed the backbone, the backbone feeds generators, wave by wave."""

    kind: Literal["pipeline"] = "pipeline"
    """Names the layout."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """What each stage does."""
    chunks: Annotated[int, Field(ge=1, le=64)] = 1
    """Model chunks in each backbone stage; more than one with the schedule `interleaved`, and only there. They shorten
    the start and the end of a step with several stages; a backbone of one stage (`pp` 1) gains nothing."""
    extra_in_flight: InFlight | None = None
    """Microbatches that each stage but the last may hold beyond those of 1F1B, within its memory: less waiting, more
    activations. By default none, or 4 where every module states its memory. A plan takes fewer where that is faster."""
    order: OrderPolicy = OrderPolicy.SEARCH
    """Order of microbatches within a backbone rank."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.chunks > 1) is not (self.schedule is Schedule.INTERLEAVED):
            raise ValueError(
                f"schedule is {self.schedule} and chunks is {self.chunks}; interleaved needs 2 chunks or more, the "
                "others have 1"
            )
        if self.schedule is not Schedule.ONE_F_ONE_B and self.extra_in_flight:
            raise ValueError(
                f"schedule {self.schedule} has extra_in_flight {self.extra_in_flight}; only 1f1b leaves a choice, "
                "leave it out"
            )
        return self


class ColocatedLayout(SpecModel):
    """Every rank runs every module, one phase after the other, each with an arrangement of its own (OrchMLLM).

    The `memory` of a module bounds each of its microbatches. What encoders (and, before generators, the backbone) keep
    of all their microbatches until their backward phase is to be computed again, or left out of `room_bytes`.
    """

    kind: Literal["colocated"]
    """Names the layout."""
    ranks_per_node: Annotated[int, Field(ge=1, le=65536)] = 8
    """Consecutive ranks of a node; batches are named so that few bytes leave their node. With `dp` or more there is one
    node, and no name saves anything."""
    row_bytes: Natural = 8192
    """Bytes of one embedding or condition between phases: the backbone's width x bytes of a number."""


class ContrastiveLayout(SpecModel):
    """Towers side by side on devices of their own, whose features meet in one loss for each contrastive batch."""

    kind: Literal["contrastive"]
    """Names the layout."""
    schedule: ContrastiveSchedule = ContrastiveSchedule.DISTMM_PIPE
    """What the stages of a tower do around the barrier. `distmm_pipe` is taken in steps where memory holds it and where
    the simulator finds it faster than `batch_sync`; the plan says which."""
    microbatches: Annotated[int, Field(ge=1, le=65536)] = 1
    """Microbatches of each rank for one contrastive batch."""
    extra_in_flight: InFlight = 0
    """Microbatches that each stage but the last may hold beyond those that `distmm_pipe` needs, within its memory."""
    interaction_ns: Natural = 0
    """Time of a contrastive batch's interaction, forward and backward, gathering of features included."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule is ContrastiveSchedule.BATCH_SYNC and self.extra_in_flight:
            raise ValueError(
                f"schedule batch_sync has extra_in_flight {self.extra_in_flight}; contrastive batches do not overlap "
                "there, leave it out"
            )
        return self


_KINDS = ("pipeline", "colocated", "contrastive")


def _of_known_kind(value: Any) -> Any:
    """Say in words what a discriminator would complain of."""
    if not isinstance(value, dict | SpecModel):
        raise ValueError(f"found {value!r}; a mapping with a kind is required, such as {{kind: pipeline}}")
    if isinstance(value, dict) and value.get("kind") not in _KINDS:
        found = f"is {value['kind']!r}" if "kind" in value else "is missing"
        raise ValueError(f"kind {found}; one of {', '.join(_KINDS)} is required")
    return value


Layout = Annotated[
    PipelineLayout | ColocatedLayout | ContrastiveLayout, Field(discriminator="kind"), BeforeValidator(_of_known_kind)
]
