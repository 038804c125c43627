"""The operations of a step, by the layout's own function: what the simulator scored is what is run."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.simulation import BACKWARD, FORWARD, Program
from trainclient.client import Batch
from trainclient.topology.process_grid import Chunk, Edge, GridProcess


class StreamError(RuntimeError):
    """Microbatches that do not follow each other, or not from the job."""


@dataclass(frozen=True, slots=True)
class StepPrograms:
    """What all stages do in one step."""

    programs: tuple[Program, ...]
    num_microbatches: int

    @classmethod
    def of(cls, execution: Execution, batch: Batch) -> "StepPrograms":
        """The programs that a header names; StreamError if it contradicts the job."""
        stages = {s.module: len(s.in_flight) for s in batch.schedules}
        wanted = {m.name: m.pp for m in execution.modules}
        if stages != wanted:
            raise StreamError(f"the header of step {batch.step} has schedules of stages {stages}; the job has {wanted}")
        found = layout_of(execution).programs(execution, batch.schedules, batch.num_microbatches)
        return cls(found, batch.num_microbatches)

    def of_process(self, process: GridProcess) -> Program:
        """What a process does; StreamError if it holds something else than the step needs."""
        modules = tuple(chunk.module.name for chunk in process.chunks)
        for program in self.programs:
            if (program.modules, program.stage) == (modules, process.stage):
                return program
        raise StreamError(
            f"the step has no program for chunks of {modules} on stage {process.stage}; the server planned another job"
        )

    def taken(self, edge: Edge) -> I64:
        """Which gradients the source of an edge has taken when it sends, int64 [microbatches].

        For each microbatch the last one whose backward, with the gradient from this edge, it runs before; -1 for none.
        It takes them in order.
        """
        found = np.full(self.num_microbatches, -1, np.int64)
        program, position = self._program_of(edge.source)
        operations = program.operations
        mine = operations.chunk == position
        forward, backward = mine & (operations.kind == FORWARD), mine & (operations.kind == BACKWARD)
        last = np.maximum.accumulate(np.where(backward, operations.microbatch, -1))
        found[operations.microbatch[forward]] = last[forward]
        return found

    def _program_of(self, chunk: Chunk) -> tuple[Program, int]:
        """The program of the stage that holds a chunk, and the chunk's position in it."""
        stage, position = chunk.number % chunk.module.pp, chunk.number // chunk.module.pp
        for program in self.programs:
            positions = [i for i, name in enumerate(program.modules) if name == chunk.module.name]
            if program.stage == stage and position < len(positions):
                return program, positions[position]
        raise StreamError(f"the step has no program for chunk {chunk.number} of module {chunk.module.name}")
