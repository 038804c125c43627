"""The part of a job that belongs to the contrastive layout."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dataserver.planning.job.fields import (
    ExecutionParts,
    ExtraInFlight,
    Extreme,
    LastStep,
    LayoutOptions,
    ModuleKind,
    Natural,
    Stream,
    most_forward_ns,
)

MAX_MICROBATCHES = 65536


class ContrastiveSchedule(StrEnum):
    """What the stages of a tower do around the barrier."""

    BATCH_SYNC = "batch_sync"
    """One contrastive batch after the other (DISTMM, section 4.3)."""
    DISTMM_PIPE = "distmm_pipe"
    """The forwards of the next batch fill the gap at the barrier (DISTMM, section 4.4)."""


class ContrastiveOptions(LayoutOptions):
    """Towers at the same time, each on its own devices, with one loss over their features for each contrastive
    batch."""

    kind: Literal["contrastive"]
    """Selects the contrastive layout."""
    schedule: ContrastiveSchedule = ContrastiveSchedule.DISTMM_PIPE
    """What the stages of a tower do while they wait for the loss. `distmm_pipe` is used in steps in which memory allows
    it and the simulator finds it faster than `batch_sync`; the plan says which was used."""
    microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)] = 1
    """Microbatches of each rank for one contrastive batch."""
    extra_in_flight: ExtraInFlight = 0
    """Microbatches that each stage but the last may hold beyond those that `distmm_pipe` needs, within its memory."""
    interaction_ns: Natural = 0
    """Nanoseconds that the loss of a contrastive batch takes, forward and backward, including the gathering of
    features."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule is ContrastiveSchedule.BATCH_SYNC and self.extra_in_flight:
            raise ValueError(
                f"schedule batch_sync has extra_in_flight {self.extra_in_flight}; contrastive batches do not overlap "
                "there, leave it out"
            )
        return self

    def num_microbatches(self, stream: Stream, execution: ExecutionParts) -> int:  # noqa: ARG002
        """Microbatches of whole contrastive batches."""
        return stream.global_batch // (stream.contrastive_batch or 1) * self.microbatches

    def extremes(self, stream: Stream, execution: ExecutionParts) -> Iterable[Extreme]:
        """Interactions, and the share by which a rank exceeds the mean."""
        batches = stream.global_batch // (stream.contrastive_batch or 1)
        yield Extreme("nanoseconds of interactions", batches * self.interaction_ns, "lower layout.interaction_ns")
        for tower in execution.modules:
            forward = most_forward_ns(stream, tower, stream.contrastive_batch or 1)
            yield Extreme(f"nanoseconds of a contrastive batch of {tower.name} x ranks", 1000 * forward * tower.dp)

    def check_modules(self, execution: ExecutionParts) -> None:
        """Refuse modules other than towers."""
        kinds = [m.kind for m in execution.modules]
        if kinds.count(ModuleKind.TOWER) < max(2, len(kinds)) or execution.microbatch != 1:
            raise ValueError(
                f"found modules of kinds {[str(k) for k in kinds]} and microbatch "
                f"{execution.microbatch}; a contrastive layout has two towers or more, nothing else, and no "
                "microbatch (layout.microbatches says it)"
            )

    def check_stream(self, stream: Stream, execution: ExecutionParts) -> None:
        """Refuse a stream without contrastive batches, and batches that do not divide."""
        batch = stream.contrastive_batch
        if batch is None:
            raise ValueError(
                "layout is contrastive and stream.contrastive_batch is absent; say how many pairs one loss couples"
            )
        if execution.end.epochs is not None and execution.end.last is LastStep.PAD:
            raise ValueError(
                "end.last is pad; a short contrastive batch would have fewer negatives, set end.last to drop"
            )
        for tower in execution.modules:
            if batch % (tower.dp * self.microbatches):
                raise ValueError(
                    f"contrastive_batch {batch} does not divide into dp {tower.dp} of {tower.name} x layout."
                    f"microbatches {self.microbatches}; use a multiple of {tower.dp * self.microbatches}"
                )
