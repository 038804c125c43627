"""What every layout has to offer, and what the simulator says of a plan."""

from collections.abc import Callable
from dataclasses import dataclass

from dataserver.planning.identity import Job
from dataserver.planning.jobspec import Execution, JobSpec
from dataserver.planning.pipeline import Pipeline, Timeline
from dataserver.planning.plan import StepPlan
from dataserver.planning.samples import StepSamples


@dataclass(frozen=True, slots=True)
class Node:
    """One row of a timeline: what runs its operations one after the other."""

    modules: tuple[str, ...]
    """Module of each chunk of the node; one, unless modules are colocated or interleaved."""
    rank: int
    """Data-parallel rank within the module."""
    stage: int
    """Pipeline stage within the module."""


@dataclass(frozen=True, slots=True)
class PlannedTimeline:
    """A simulated step with the meaning of its nodes."""

    nodes: tuple[Node, ...]
    pipeline: Pipeline
    timeline: Timeline

    @property
    def makespan_ns(self) -> int:
        """Simulated time of the step."""
        return self.timeline.makespan_ns


@dataclass(frozen=True, slots=True)
class LayoutPlanner:
    """The functions of one layout."""

    plan: Callable[[Job, int, StepSamples], StepPlan]
    """Plan a step of a job: job, step, its samples in canonical order."""
    baseline: Callable[[Execution], Execution]
    """The same execution without any planning: canonical order."""
    timeline: Callable[[JobSpec, StepPlan], PlannedTimeline]
    """Simulate a plan."""
    lower_bound_ns: Callable[[Job, StepPlan], int]
    """A time that no plan of the same sequences can beat."""
