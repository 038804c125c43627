"""The part of a job that belongs to the pipelined layout."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dataserver.planning.jobspec import Schedule, WaveOptions


class PipelinedOptions(WaveOptions):
    """Modules on devices of their own: encoders feed the backbone, the backbone feeds generators, wave by wave."""

    kind: Literal["pipelined"] = "pipelined"
    """Names the layout."""
    chunks: Annotated[int, Field(ge=1, le=64)] = 1
    """Model chunks in each backbone stage; more than one with the schedule `interleaved`, and only there. They shorten
    the start and the end of a step with several stages; a backbone of one stage (`pp` 1) gains nothing."""

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        if (self.chunks > 1) is not (self.schedule is Schedule.INTERLEAVED):
            raise ValueError(
                f"schedule is {self.schedule} and chunks is {self.chunks}; interleaved needs 2 chunks or more, the "
                "others have 1"
            )
        return self
