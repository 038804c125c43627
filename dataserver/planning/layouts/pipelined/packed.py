"""A step of a pipelined job whose sequences and number of microbatches are settled."""

from dataclasses import dataclass

from dataserver.planning import I64
from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.stream.samples import StepSamples


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The samples of one step in their sequences."""

    job: Job
    step: int
    samples: StepSamples
    sequence: I64
    """int64 [n]: the sequence of each sample."""
    num_microbatches: int
    """Number of microbatches that each rank runs in the step."""
    parity: bool = False
    """Whether all ranks of a wave must have images, or none."""

    @property
    def num_sequences(self) -> int:
        """Of all ranks together."""
        return int(self.sequence.max(initial=-1)) + 1

    @property
    def execution(self) -> Execution:
        """How the job runs."""
        return self.job.spec.execution

    @property
    def layout(self) -> PipelinedOptions:
        """What the job says about this layout."""
        return self.execution.options(PipelinedOptions)

    @property
    def modules(self) -> tuple[ModuleSpec, ...]:
        """Encoders, backbone, generators: the rows of its placement problem."""
        return self.execution.by_depth
