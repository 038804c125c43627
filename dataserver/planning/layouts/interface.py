"""The one interface of a layout for everything else: how modules share the devices and the time of a step.

A layout is a folder of this package, named by `execution.layout.kind`. Its `options` are the part of a job that belongs
to it, registered in `job.spec.AnyLayout`; its `layout` holds a `LAYOUT`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from dataserver.planning import I64, Bool
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution, JobSpec
from dataserver.planning.layouts.shared.ablation import AblationEntry
from dataserver.planning.layouts.shared.alternatives import Alternatives
from dataserver.planning.plan.plan import ArrangedStep, ModuleSchedule, StepPlan
from dataserver.planning.simulation import Pipeline, Program, Timeline
from dataserver.planning.stream.samples import ShardTable, StepSamples
from dataserver.planning.stream.statistics import ShardStatistics


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


class Limits(Protocol):
    """What no plan of a job could hold, looked for in the sizes of every shard before the job begins."""

    def add_statistics(self, dataset: int, statistics: ShardStatistics) -> Bool:
        """Look at what is known of all shards of a dataset, before any of them is looked at by `add`.

        Args:
            dataset: position in the job's dataset list.
            statistics: of its s shards.

        Returns:
            bool [s]: True where nothing can be wrong, and nothing is missing for `check`; `add` the others.
        """

    def add(self, dataset: int, table: ShardTable, where: str) -> None:
        """Look at the samples of one shard.

        Args:
            dataset: position in the job's dataset list.
            table: the shard's samples.
            where: name of dataset and shard, for messages.

        Raises:
            SampleTooLargeError: a module's memory cannot hold a sample or an image even alone.
            ValueError: samples that the job's modules do not handle.
        """

    def check(self, repeats: Sequence[int]) -> None:
        """Look at all shards together.

        Args:
            repeats: for each dataset how often a sample of it can be among the samples that must be held together; 0 if
                it is not used.

        Raises:
            ValueError: samples that may meet and that no plan could hold.
        """


@dataclass(frozen=True, slots=True)
class Layout:
    """The functions of one layout."""

    plan: Callable[[Job, int, StepSamples], StepPlan]
    """Plan a step of a job: job, step, its samples in canonical order."""
    ablation: Callable[[Job], Sequence[AblationEntry]]
    """The path from the baseline, which is the same job without any planning, to the job, one change at a time."""
    finalists: Callable[[Job], Sequence[AblationEntry]]
    """Other ways to run a job, within its memory, that its plan may not be slower than; those of the ablation that are
    not among what `plan` compares."""
    programs: Callable[[Execution, Sequence[ModuleSchedule], int], tuple[Program, ...]]
    """What every stage does, from what a header says: the schedules of the modules and the number of microbatches."""
    timeline: Callable[[JobSpec, ArrangedStep], PlannedTimeline]
    """Simulate the programs of a plan."""
    lower_bound_ns: Callable[[Job, StepPlan], int]
    """A time that no plan of the same sequences can beat."""
    loads: Callable[[Execution, ArrangedStep], dict[str, I64]]
    """For each module int64 [dp, microbatches]: planned forward time, nanoseconds."""
    limits: Callable[[JobSpec], Limits]
    """What no plan of a job could hold."""
    alternatives: Callable[[Job], Alternatives]
    """Other ways to run a job."""
    figures: Callable[[Job, Job, StepPlan], Mapping[str, float]]
    """What else tells plans of this layout apart, by `FIGURES`: the job as it is, the job of the plan, the plan."""


FIGURES: Mapping[str, str] = {
    "fill_percent": "tokens over those that the sequences in use could hold",
    "empty_sequences_percent": "sequence slots that hold no sample",
    "between_nodes_bytes": "bytes that embeddings and conditions, forward alone, travel between nodes",
}
"""Figures that some layouts add to those of all."""


def layout_of(execution: Execution) -> Layout:
    """The layout of a job: the `LAYOUT` in the folder of its options."""
    folder = type(execution.layout).__module__.rpartition(".")[0]
    found = import_module(f"{folder}.layout").LAYOUT
    if not isinstance(found, Layout):
        raise TypeError(f"{folder}.layout.LAYOUT is a {type(found).__name__}; a Layout is required")
    return found
