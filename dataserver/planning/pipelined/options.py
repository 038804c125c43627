"""The part of a job that belongs to the pipelined layout."""

from math import gcd
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dataserver.planning.jobspec import ExecutionParts, ModuleKind, Schedule, Stream, WaveOptions


class PipelinedOptions(WaveOptions):
    """Modules on devices of their own: encoders feed the backbone, the backbone feeds generators, wave by wave."""

    kind: Literal["pipelined"] = "pipelined"
    """Names the layout."""
    chunks: Annotated[int, Field(ge=1, le=64)] = 1
    """Model chunks in each backbone stage; more than one with the schedule `interleaved`, and only there. They shorten
    the start and the end of a step with several stages; a backbone of one stage (`pp` 1) gains nothing."""

    @property
    def num_chunks(self) -> int:
        """Of a backbone stage; where others have fewer, room is kept for as many."""
        return self.chunks

    def step_size(self, stream: Stream, execution: ExecutionParts) -> dict[str, int]:
        """Where memory is shared by the ranks of an island, every look at it takes all of them."""
        found = super().step_size(stream, execution)
        if any(m.memory is not None and m.kind is not ModuleKind.BACKBONE for m in execution.modules):
            backbone = next(m for m in execution.modules if m.kind is ModuleKind.BACKBONE)
            found["island_work"] = stream.global_batch * backbone.dp // gcd(*(m.dp for m in execution.modules))
        return found

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        if (self.chunks > 1) is not (self.schedule is Schedule.INTERLEAVED):
            raise ValueError(
                f"schedule is {self.schedule} and chunks is {self.chunks}; interleaved needs 2 chunks or more, the "
                "others have 1"
            )
        return self
