"""One step of one process: the operations of its pipeline stage, in the order that the planner's simulator scored."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataserver.planning.job import Execution
from dataserver.planning.jobspec import ModuleSpec
from dataserver.planning.layout import layout_of
from dataserver.planning.simulation import OperationKind, Program
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

    def __init__(self, execution: Execution, role: Role[Any], stage: Stage, before: Stage | None) -> None:
        """Make an executor for a stage of the joined pipeline; `before` is the one that feeds it."""
        self._execution = execution
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
        program, newest = self._program(batch), -1
        held_before = _held(batch, self._before or self._stage)
        for operation in program.operations:
            if operation.kind is OperationKind.BACKWARD:
                self._role.backward(operation.microbatch, newest - held_before)
                continue
            if batch is None:
                batch = self._next(batches, record)
            self._forward(batch, record, operation.microbatch)
            batch, newest = None, operation.microbatch
        self._role.end_step()
        return record

    def _program(self, batch: Batch) -> Program:
        """What this process does in a step, as it was simulated; StreamError if the header contradicts the job."""
        module, stage = self._stage
        stages = {s.module: len(s.in_flight) for s in batch.schedules}
        wanted = {m.name: m.pp for m in self._execution.modules}
        if stages != wanted:
            raise StreamError(f"the header of step {batch.step} has schedules of stages {stages}; the job has {wanted}")
        found = layout_of(self._execution).programs(self._execution, batch.schedules, batch.num_microbatches)
        return next(p for p in found if module.name in p.modules and p.stage == stage)

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


def _held(batch: Batch, stage: Stage) -> int:
    """Microbatches that a stage holds at most in the step of a microbatch."""
    module, number = stage
    return next(int(s.in_flight[number]) for s in batch.schedules if s.module == module.name)
