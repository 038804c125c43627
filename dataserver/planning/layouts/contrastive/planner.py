"""Towers side by side on devices of their own, whose features meet in contrastive batches (DISTMM, NSDI 2024).

A contrastive batch is a run of `contrastive_batch` samples in canonical order. No routing says where features go, since
the interaction gathers them all; the items of the views name the pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import I64
from dataserver.planning.costs.model import forward_ns
from dataserver.planning.job.fields import BalancePolicy, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.contrastive.arranging import BatchedStep, arrange, batched_step
from dataserver.planning.layouts.contrastive.limits import TowerMemoryError
from dataserver.planning.layouts.contrastive.memory import in_flight_within_memory
from dataserver.planning.layouts.contrastive.options import ContrastiveSchedule
from dataserver.planning.layouts.contrastive.programs import tower_in_flight
from dataserver.planning.layouts.contrastive.timeline import timeline
from dataserver.planning.layouts.shared.candidates import ranked, shown
from dataserver.planning.layouts.shared.waves import EXTRAS
from dataserver.planning.plan.expectation import item_sizes, item_sums
from dataserver.planning.plan.naming import listed, milliseconds, unit_of
from dataserver.planning.plan.plan import (
    ArrangedStep,
    Arrangement,
    Decision,
    ModuleSchedule,
    StepPlan,
    make_plan,
)
from dataserver.planning.stream.samples import StepSamples

Refusals = Mapping[ContrastiveSchedule, TowerMemoryError]
"""Why memory does not hold a schedule."""


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step: balanced and in canonical order, under both schedules, the fastest that fits memory.

    On a tie contrastive batches do not overlap, since that holds fewer microbatches. A job that asks for `batch_sync`
    gets nothing else.

    Raises:
        TowerMemoryError: the memory of a tower does not hold its part of a contrastive batch.
        ValueError: samples that are no pairs, or no whole contrastive batches.
    """
    batched = batched_step(job, step, samples)
    found, refused = _compare(batched)
    if not found:
        raise refused[ContrastiveSchedule.BATCH_SYNC]
    candidates = ranked(found)
    said = _step_decision(batched, candidates, refused), *_tower_decisions(batched, candidates[0])
    return replace(make_plan(job, step, candidates[0].plan), candidates=shown(candidates), decisions=said)


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """One of the plans that are compared."""

    balanced: bool
    schedule: ContrastiveSchedule
    extra: int
    """Microbatches that may run ahead beyond those of the schedule."""
    several: bool
    """Whether other numbers of them are compared."""
    plan: ArrangedStep
    makespan_ns: int

    @property
    def name(self) -> str:
        """Name of the candidate: schedule and order."""
        ahead = f", {self.extra} extra in flight" if self.extra and self.several else ""
        return f"{self.schedule}, {'balanced' if self.balanced else 'canonical order'}{ahead}"


def _compare(batched: BatchedStep) -> tuple[list[CandidatePlan], Refusals]:
    """The plans within memory, and why there are none under a schedule."""
    found, refused = list[CandidatePlan](), dict[ContrastiveSchedule, TowerMemoryError]()
    schedules = [(ContrastiveSchedule.BATCH_SYNC, 0)]
    if batched.layout.schedule is ContrastiveSchedule.DISTMM_PIPE:
        schedules += [(batched.layout.schedule, extra) for extra in _extras(batched)]
    balances = any(t.balance is not BalancePolicy.NONE for t in batched.towers)
    for balanced in (True, False) if balances else (False,):
        arrangements = tuple(arrange(batched, tower, balanced=balanced) for tower in batched.towers)
        for schedule, extra in schedules:
            try:
                made = _assemble(batched, arrangements, schedule, extra)
            except TowerMemoryError as error:
                refused.setdefault(schedule, error)
                continue
            makespan = timeline(batched.job.spec, made).makespan_ns
            found.append(CandidatePlan(balanced, schedule, extra, len(schedules) > 2, made, makespan))
    return found, refused


def _extras(batched: BatchedStep) -> tuple[int, ...]:
    """Numbers of microbatches that may run ahead beyond those of the schedule."""
    return tuple(extra for extra in EXTRAS if extra <= batched.layout.extra_in_flight)


def _assemble(
    batched: BatchedStep, arrangements: tuple[Arrangement, ...], schedule: ContrastiveSchedule, extra: int
) -> ArrangedStep:
    """A plan; TowerMemoryError where memory does not hold it."""
    pairs = zip(batched.towers, arrangements, strict=True)
    held = [
        in_flight_within_memory(batched, tower, arrangement, schedule, _wanted(batched, tower, schedule, extra))
        for tower, arrangement in pairs
    ]
    drain_every = batched.layout.microbatches if schedule is ContrastiveSchedule.BATCH_SYNC else 0
    return ArrangedStep(
        samples=batched.samples,
        num_microbatches=batched.num_microbatches,
        sequences_per_microbatch=0,
        arrangements=arrangements,
        routings=(),
        schedules=tuple(ModuleSchedule(t.name, h, drain_every) for t, h in zip(batched.towers, held, strict=True)),
    )


def _wanted(batched: BatchedStep, tower: ModuleSpec, schedule: ContrastiveSchedule, extra: int) -> I64:
    """Microbatches in flight as far as memory does not limit them. int64 [pp]."""
    wanted = tower_in_flight(tower.pp, batched.layout.microbatches, schedule, extra)
    return np.minimum(wanted, batched.num_microbatches)


def _step_decision(batched: BatchedStep, candidates: Sequence[CandidatePlan], refused: Refusals) -> Decision:
    """The decision for a schedule and its reason."""
    best, wanted = candidates[0], batched.layout.schedule
    time, other = milliseconds(best.makespan_ns), next((c for c in candidates if c.schedule is not best.schedule), None)
    if other is not None:
        tie = "; of two equally fast ones, the one that holds less" if best.makespan_ns == other.makespan_ns else ""
        reason = f"simulated {time}, against {milliseconds(other.makespan_ns)} for {other.schedule}{tie}"
    elif best.schedule is not wanted:
        reason = str(refused[wanted])
    else:
        reason = f"as the job asks; simulated {time}"
    return Decision("step", best.schedule.value, reason)


def _tower_decisions(batched: BatchedStep, best: CandidatePlan) -> tuple[Decision, ...]:
    """What balancing gained in each tower, and what memory keeps it from holding."""
    found = []
    for tower, schedule in zip(batched.towers, best.plan.schedules, strict=True):
        if best.balanced and tower.balance is not BalancePolicy.NONE:
            after, before = (_excess(batched, tower, balanced) for balanced in (True, False))
            reason = (
                f"in any contrastive batch the fullest rank is at most {after} % above the mean, "
                f"against {before} % in canonical order"
            )
            found.append(Decision(tower.name, "padded" if tower.padded else tower.balance.value, reason))
        free = _wanted(batched, tower, best.schedule, best.extra)
        if tower.memory is not None and not np.array_equal(free, schedule.in_flight):
            reason = f"memory holds {tower.memory.units:,} {unit_of(tower)}; {listed(free)} without that limit"
            found.append(Decision(tower.name, f"in flight: {listed(schedule.in_flight)}", reason))
    return tuple(found)


def _excess(batched: BatchedStep, tower: ModuleSpec, balanced: bool) -> str:
    """Percent by which the fullest rank of a contrastive batch exceeds the mean, padding included, at most."""
    loads = forward_ns(tower.cost, item_sizes(tower, batched.samples))
    arrangement = arrange(batched, tower, balanced=balanced)
    sums = item_sums(tower, arrangement, loads, batched.num_microbatches)
    table = sums.reshape(tower.dp, batched.num_batches, batched.layout.microbatches).sum(axis=2)
    total = np.maximum(table.sum(axis=0), 1)
    tenths = int(((table.max(axis=0) * tower.dp - total) * 1_000 // total).max())
    return f"{tenths // 10}.{tenths % 10}"
