"""A step of a pipelined job whose sequences and number of microbatches are settled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from dataserver.planning import I64, cores, shared_out
from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.pipelined.interleaving import stages_in_flight
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.layouts.shared.waves import InFlight, Units
from dataserver.planning.stream.samples import StepSamples

SHARED_OPERATIONS = 1 << 15
"""The fewest operations of a step whose placements and candidates threads share: a candidate of smaller ones takes less
than about two milliseconds, and half of them in the interpreter, which one thread runs at a time."""

Result = TypeVar("Result")


@dataclass(frozen=True)
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
        """Sequences of all ranks together."""
        return int(self.sequence.max(initial=-1)) + 1

    @property
    def execution(self) -> Execution:
        """Execution part of the job."""
        return self.job.spec.execution

    @cached_property
    def layout(self) -> PipelinedOptions:
        """What the job says about this layout."""
        return self.execution.options(PipelinedOptions)

    @cached_property
    def modules(self) -> tuple[ModuleSpec, ...]:
        """Encoders, backbone, generators: the rows of its placement problem."""
        return self.execution.by_depth

    @property
    def is_shared(self) -> bool:
        """Whether it is worth while that threads share what is computed of it, and there are any."""
        operations = 2 * self.num_microbatches * sum(m.dp * m.pp for m in self.modules)  # of one simulation
        return cores() > 1 and operations >= SHARED_OPERATIONS

    def each(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """What the calls return; threads share those of a large step, since none must depend on another."""
        return shared_out(calls) if self.is_shared else [call() for call in calls]

    def in_flight(self, extra: int, units: Units) -> InFlight | None:
        """What every stage holds (`stages_in_flight`), found once for each `extra` where nothing limits it."""
        if units:
            return stages_in_flight(self.execution, self.num_microbatches, extra, units)
        if extra not in self._unlimited:
            self._unlimited[extra] = stages_in_flight(self.execution, self.num_microbatches, extra, units)
        return self._unlimited[extra]

    @cached_property
    def _unlimited(self) -> dict[int, InFlight | None]:
        return {}
