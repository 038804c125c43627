"""The plans of a grouped step that are compared: groups whose images are arranged and whose stages are scheduled."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.grouped.arranging import ArrangedGroups, Microbatches, arrange_groups
from dataserver.planning.layouts.grouped.sequences import units_held
from dataserver.planning.layouts.grouped.timeline import timeline
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.layouts.shared import waves
from dataserver.planning.layouts.shared.waves import FEWER, InFlight
from dataserver.planning.plan.plan import ArrangedStep, RankGroups
from dataserver.planning.stream.samples import StepSamples

FEWER_SINCE = 7
"""The first plan_version whose groups are also compared with fewer microbatches in flight than memory holds."""


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """One of the plans that are compared."""

    groups: str
    """How they were found, for people."""
    changes: tuple[str, ...]
    """What was changed after the groups were found, for people."""
    plan: ArrangedStep
    planned: PlannedTimeline
    held: InFlight
    arranged: ArrangedGroups

    @property
    def name(self) -> str:
        """How it was found, and all that was changed since."""
        fewer = () if self.held.at_most is None else (f"at most {self.held.at_most} in flight",)
        return ", ".join((self.groups, *self.changes, *fewer))

    @property
    def makespan_ns(self) -> int:
        """Simulated time of the step."""
        return self.planned.makespan_ns


def plain_candidate(
    job: Job, samples: StepSamples, groups: str, microbatches: Microbatches, sequence: I64
) -> CandidatePlan:
    """Groups as they were found; `sequence` is int64 [n], the sequence of each sample."""
    return _simulated(job, samples, groups, (), arrange_groups(job, samples, microbatches, sequence), 0)


def with_microbatches(job: Job, seed: CandidatePlan, microbatches: Microbatches, *changes: str) -> CandidatePlan:
    """The sequences of a candidate in other microbatches; what was changed in all."""
    arranged = arrange_groups(job, seed.plan.samples, microbatches, seed.arranged.sequence)
    return _simulated(job, seed.plan.samples, seed.groups, changes, arranged, 0, seed.held.at_most)


def with_extra(job: Job, seed: CandidatePlan, extra: int) -> CandidatePlan:
    """A candidate with more microbatches in flight."""
    changes = (*seed.changes, f"up to {extra} extra in flight")
    return _simulated(job, seed.plan.samples, seed.groups, changes, seed.arranged, extra, seed.held.at_most)


def with_fewer_in_flight(job: Job, seed: CandidatePlan) -> Iterator[CandidatePlan]:
    """A candidate without extra microbatches in flight as less memory would run it; nothing where no module states any.

    More in flight may be slower: under GPipe, a stage runs all forwards that it holds before its first backward.
    """
    execution = job.spec.execution
    limited = [m.name for m in execution.modules if m.memory is not None and m.runs_backward]
    most = max((int(seed.held.held[name].max()) for name in limited), default=0)
    for number in FEWER if execution.plan_version >= FEWER_SINCE else ():
        if number < most:
            yield _simulated(job, seed.plan.samples, seed.groups, seed.changes, seed.arranged, 0, number)


def _simulated(
    job: Job,
    samples: StepSamples,
    groups: str,
    changes: Sequence[str],
    arranged: ArrangedGroups,
    extra: int,
    at_most: int | None = None,
) -> CandidatePlan:
    execution, microbatches = job.spec.execution, arranged.microbatches
    bare = ArrangedStep(
        samples=samples,
        num_microbatches=len(microbatches),
        sequences_per_microbatch=max(1, *(len(g.sequences) for here in microbatches for g in here)),
        arrangements=arranged.arrangements,
        routings=arranged.routings,
        groups=_rank_groups(execution.backbone.name, microbatches),
    )
    units = {m.name: units_held(execution, m, bare) for m in execution.modules if m.memory is not None}
    held = waves.in_flight(execution, bare.num_microbatches, extra, units, at_most)
    plan = replace(bare, schedules=held.schedules(execution))
    return CandidatePlan(groups, tuple(changes), plan, timeline(job.spec, plan), held, arranged)


def _rank_groups(module: str, microbatches: Microbatches) -> RankGroups:
    rows = [(wave, g.first_rank, g.degree) for wave, groups in enumerate(microbatches) for g in groups]
    return RankGroups(module, *np.array(rows, np.int64).T.copy())
