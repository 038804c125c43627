"""One step of one process: the operations of its pipeline stage, in the order that the planner's simulator scored."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataserver.planning.jobspec import ModuleSpec
from dataserver.planning.simulation import OperationKind, stage_operations
from trainclient.client import Batch
from trainclient.parallel.roles import Role


class StreamError(RuntimeError):
    """Microbatches that do not follow each other."""


@dataclass(slots=True)
class StepRecord:
    """What one process saw of a step."""

    step: int
    num_microbatches: int
    text_tokens: int
    """Denominator of the text loss."""
    target_patches: int
    """Denominator of the generator's loss."""
    data_wait_s: float = 0.0
    """Time in which this process waited for its next microbatch."""
    num_items: int = 0
    """Samples (backbone) or images in this process's views."""
    num_invalid: int = 0
    """Items of these that are known to be invalid."""
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    """(dataset, pass, sample) of every item."""


Stage = tuple[ModuleSpec, int]
"""A module and the number of one of its stages."""


class StepExecutor:
    """Runs steps of one process."""

    def __init__(self, role: Role[Any], stage: Stage, before: Stage | None) -> None:
        """Make an executor for a stage of the joined pipeline; `before` is the one that feeds it."""
        self._role = role
        self._stage = stage
        self._before = before

    def run(self, batches: Iterator[Batch]) -> StepRecord | None:
        """Run the forward and backward passes of the next step; gradients accumulate in the role's module.

        Args:
            batches: microbatches in plan order, standing before the first one of a step.

        Returns:
            What was seen, or None if the stream has ended.

        Raises:
            StreamError: the microbatches are not those of one step.
        """
        batch = next(batches, None)
        if batch is None:
            return None
        record = StepRecord(batch.step, batch.num_microbatches, batch.text_tokens, batch.target_patches)
        self._role.begin_step()
        held, newest = _in_flight(batch, self._stage), -1
        held_before = held if self._before is None else _in_flight(batch, self._before)
        for operation in stage_operations(held, record.num_microbatches):
            if operation.kind is OperationKind.BACKWARD:
                self._role.backward(operation.microbatch, newest - held_before)
                continue
            if batch is None:
                batch = self._next(batches, record)
            self._forward(batch, record, operation.microbatch)
            batch, newest = None, operation.microbatch
        self._role.end_step()
        return record

    def _next(self, batches: Iterator[Batch], record: StepRecord) -> Batch:
        batch = next(batches, None)
        if batch is None:
            raise StreamError(f"the stream ended within step {record.step}; every step must be complete")
        return batch

    def _forward(self, batch: Batch, record: StepRecord, microbatch: int) -> None:
        if (batch.step, batch.microbatch) != (record.step, microbatch):
            raise StreamError(
                f"step {batch.step}, microbatch {batch.microbatch} came where step {record.step}, microbatch "
                f"{microbatch} was due"
            )
        items = batch.items
        record.data_wait_s += batch.wait_s
        record.num_items += len(items)
        record.num_invalid += int(np.count_nonzero(items.invalid))
        record.samples += zip(items.dataset.tolist(), items.pass_.tolist(), items.sample.tolist(), strict=True)
        self._role.forward(batch)


def _in_flight(batch: Batch, stage: Stage) -> int:
    """Microbatches that a stage holds at most in the step of a microbatch; StreamError if the header does not say."""
    module, number = stage
    held = batch.in_flight.get(module.name, ())
    if number >= len(held):
        raise StreamError(f"step {batch.step} says nothing of stage {number} of {module.name}; its header has {held}")
    return held[number]
