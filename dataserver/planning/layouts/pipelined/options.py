"""The part of a job that belongs to the pipelined layout."""

from math import gcd
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dataserver.planning.job.fields import ExecutionParts, ModuleKind, Schedule, Stream, WaveOptions


class PipelinedOptions(WaveOptions):
    """Each module has its own devices: encoders feed the backbone, and the backbone feeds generators, wave by wave."""

    kind: Literal["pipelined"] = "pipelined"
    """Selects the pipelined layout."""
    chunks: Annotated[int, Field(ge=1, le=64)] = 1
    """Model chunks in each backbone stage; more than one only with the schedule `interleaved`, which needs them. They
    shorten the start and the end of a step with several stages; a backbone of one stage (`pp` 1) gains nothing."""
    fewest_microbatches: bool | None = None
    """Whether a step has as few microbatches as its samples and memory need. For trainers that run a fixed number of
    microbatches, or pad each one to `seq_len`. By default plans choose the number."""

    @property
    def num_chunks(self) -> int:
        """Chunks of a backbone stage; where others have fewer, room is kept for as many."""
        return self.chunks

    def step_size(self, stream: Stream, execution: ExecutionParts) -> dict[str, int]:
        """Where memory is shared by the ranks of a component, every look at it takes all of them."""
        found = super().step_size(stream, execution)
        if any(m.memory is not None and m.handles_images for m in execution.modules):
            common = gcd(*(m.dp for m in execution.modules))
            found["component_work"] = stream.global_batch * execution.backbone.dp // common
        return found

    def check_images(self, execution: ExecutionParts) -> None:
        """Refuse modules between which parity, or images on the ranks of their sequences, mean nothing."""
        encoders = execution.of_kind(ModuleKind.ENCODER)
        generators = [m.name for m in execution.of_kind(ModuleKind.GENERATOR)]
        if execution.modality_parity and (len(encoders) != 1 or generators):
            raise ValueError(
                f"modality_parity needs one encoder and no generator, whose ranks it would not keep together; found "
                f"the encoders {[m.name for m in encoders]} and the generators {generators}: leave modality_parity out"
            )
        if not execution.identity_routing:
            return
        if not encoders or generators:
            raise ValueError(
                f"identity_routing needs an encoder and no generator; found the encoders {[m.name for m in encoders]} "
                f"and the generators {generators}: leave identity_routing out"
            )
        backbone = execution.backbone
        degrees = {m.name: (m.dp, m.tp, m.sp) for m in (*encoders, backbone)}
        if len(set(degrees.values())) > 1:
            raise ValueError(
                f"modules have (dp, tp, sp) {degrees}; with identity_routing ranks of the backbone run the encoders "
                f"too: give these the degrees of module {backbone.name}, or leave identity_routing out"
            )

    @field_validator("fewest_microbatches", mode="after")
    @classmethod
    def _only_if_so(cls, value: bool | None) -> bool | None:
        """A job that does not ask for it is the same whether it says so or not."""
        return value or None

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        if (self.chunks > 1) is not (self.schedule is Schedule.INTERLEAVED):
            raise ValueError(
                f"schedule is {self.schedule} and chunks is {self.chunks}; interleaved needs 2 chunks or more, the "
                "others have 1"
            )
        return self
