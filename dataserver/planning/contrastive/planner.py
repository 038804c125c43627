"""Towers side by side on devices of their own, whose features meet in contrastive batches (DISTMM, NSDI 2024).

A contrastive batch is a run of `contrastive_batch` samples in canonical order, and a barrier: every tower spreads its
samples over its own ranks and microbatches, and none leaves it. No routing says where features go, since the
interaction gathers them all; the items of the views name the pairs.
"""

from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning.balancing import BALANCERS, BinRoom, BinRoomError
from dataserver.planning.contrastive.batches import (
    GroupedArrangement,
    balance_groups,
    contrastive_groups,
    deal_by_size,
    groups_in_order,
    pad_groups,
)
from dataserver.planning.contrastive.limits import TowerMemoryError, unit_of
from dataserver.planning.contrastive.memory import TowerMemory, sums_with_padding
from dataserver.planning.contrastive.options import ContrastiveOptions, ContrastiveSchedule
from dataserver.planning.contrastive.programs import tower_in_flight
from dataserver.planning.contrastive.timeline import timeline
from dataserver.planning.costs import forward_ns
from dataserver.planning.expectation import item_sizes
from dataserver.planning.identity import Job
from dataserver.planning.job import Execution
from dataserver.planning.jobspec import BalancePolicy, ModuleSpec
from dataserver.planning.layout import canonical_modules
from dataserver.planning.naming import listed, milliseconds
from dataserver.planning.plan import Arrangement, Candidate, Decision, ModuleSchedule, StepPlan, make_plan
from dataserver.planning.samples import I64, StepSamples


def baseline(execution: Execution) -> Execution:
    """Canonical order dealt out in runs, one contrastive batch after the other, as if memory were endless."""
    changes = {"schedule": ContrastiveSchedule.BATCH_SYNC, "extra_in_flight": 0}
    layout = execution.options(ContrastiveOptions).model_copy(update=changes)
    return execution.model_copy(update={"modules": canonical_modules(execution), "layout": layout})


def plan(job: Job, step: int, samples: StepSamples) -> StepPlan:
    """Plan one step: balanced and in canonical order, under both schedules, the fastest that fits memory.

    On a tie contrastive batches do not overlap, since that holds fewer microbatches. A job that asks for `batch_sync`
    gets nothing else.

    Raises:
        TowerMemoryError: the memory of a tower does not hold its part of a contrastive batch.
        ValueError: samples that are no pairs, or no whole contrastive batches.
    """
    return _Planner(job, step, samples).plan()


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way to run the step."""

    balanced: bool
    schedule: ContrastiveSchedule
    plan: StepPlan
    makespan_ns: int

    @property
    def candidate(self) -> Candidate:
        """How it is shown."""
        order = "balanced" if self.balanced else "canonical order"
        return Candidate(f"{self.schedule}, {order}", self.makespan_ns)


class _Planner:
    """The stages of planning, over the samples of one step."""

    def __init__(self, job: Job, step: int, samples: StepSamples) -> None:
        self._job, self._step, self._samples = job, step, samples
        self._towers = job.spec.execution.modules
        self._layout = job.spec.execution.options(ContrastiveOptions)
        self._group = contrastive_groups(len(samples), job.stream.contrastive_batch or 1)
        if not len(samples) or (np.diff(samples.image_offsets) != 1).any():
            raise ValueError(f"step {step} has no samples, or not one image for each; contrastive samples are pairs")
        self._num_groups = int(self._group[-1]) + 1

    def plan(self) -> StepPlan:
        wanted, attempts, refused = self._layout.schedule, list[_Attempt](), dict[ContrastiveSchedule, ValueError]()
        schedules = [ContrastiveSchedule.BATCH_SYNC]
        if wanted is ContrastiveSchedule.DISTMM_PIPE:
            schedules.append(wanted)
        spread = any(t.balance is not BalancePolicy.NONE for t in self._towers)
        for balanced in (True, False) if spread else (False,):
            arrangements = tuple(self._arrange(tower, balanced) for tower in self._towers)
            for schedule in schedules:
                try:
                    made = self._assemble(arrangements, schedule)
                except TowerMemoryError as error:
                    refused.setdefault(schedule, error)
                    continue
                makespan = timeline(self._job.spec, made).makespan_ns
                attempts.append(_Attempt(balanced, schedule, made, makespan))
        if not attempts:
            raise refused[ContrastiveSchedule.BATCH_SYNC]
        ranked = sorted(attempts, key=lambda attempt: attempt.makespan_ns)
        candidates = tuple(attempt.candidate for attempt in ranked) if len(ranked) > 1 else ()
        return replace(ranked[0].plan, candidates=candidates, decisions=self._decisions(ranked, refused))

    def _arrange(self, tower: ModuleSpec, balanced: bool) -> Arrangement:
        """The samples of every contrastive batch on ranks and microbatches; within these, in canonical order."""
        sizes, count = item_sizes(tower, self._samples), self._num_groups * self._layout.microbatches
        place = self._spread(tower, sizes, balanced)
        order = np.lexsort((np.arange(len(sizes)), place.microbatch, place.rank))
        rank, microbatch, rows = place.rank[order], place.microbatch[order], sizes[order]
        first, before = np.searchsorted(rank * count + microbatch, rank * count + microbatch), np.cumsum(rows) - rows
        slot = np.arange(len(order)) - first
        return Arrangement(tower.name, order, rank, microbatch, slot, before - before[first])

    def _spread(self, tower: ModuleSpec, sizes: I64, balanced: bool) -> GroupedArrangement:
        loads, size = forward_ns(tower.cost, sizes), self._layout.microbatches
        if not balanced or tower.balance is BalancePolicy.NONE:
            return groups_in_order(loads, self._group, tower.dp, size)
        room = None if tower.memory is None else BinRoom(sizes, tower.memory.units)
        try:
            if tower.padded:
                return pad_groups(loads, self._group, tower.dp, size, room)
            return balance_groups(loads, self._group, tower.dp, size, BALANCERS[tower.balance.value], room)
        except BinRoomError:  # placing by time found no way; by size there is one in every job that was accepted
            return deal_by_size(sizes, self._group, tower.dp, size, tower.padded)

    def _assemble(self, arrangements: tuple[Arrangement, ...], schedule: ContrastiveSchedule) -> StepPlan:
        """A plan; TowerMemoryError where memory does not hold it."""
        size = self._layout.microbatches
        pairs = zip(self._towers, arrangements, strict=True)
        held = [self._in_flight(tower, arrangement, schedule) for tower, arrangement in pairs]
        drain_every = size if schedule is ContrastiveSchedule.BATCH_SYNC else 0
        return make_plan(
            self._job,
            self._step,
            self._samples,
            num_microbatches=self._num_groups * size,
            sequences_per_microbatch=0,
            arrangements=arrangements,
            routings=(),
            schedules=tuple(ModuleSchedule(t.name, h, drain_every) for t, h in zip(self._towers, held, strict=True)),
        )

    def _wanted(self, tower: ModuleSpec, schedule: ContrastiveSchedule) -> I64:
        """Microbatches in flight as far as memory does not limit them. int64 [pp]."""
        size, extra = self._layout.microbatches, self._layout.extra_in_flight
        return np.minimum(tower_in_flight(tower.pp, size, schedule, extra), size * self._num_groups)

    def _in_flight(self, tower: ModuleSpec, arrangement: Arrangement, schedule: ContrastiveSchedule) -> I64:
        """Microbatches that the stages of a tower hold, within its memory. int64 [pp]."""
        wanted = self._wanted(tower, schedule)
        if tower.memory is None:
            return wanted
        memory = TowerMemory(
            self._job, self._step, self._samples, tower, tower.memory, arrangement, self._layout.microbatches
        )
        return memory.in_flight(wanted, schedule)

    def _decisions(
        self, ranked: list[_Attempt], refused: dict[ContrastiveSchedule, ValueError]
    ) -> tuple[Decision, ...]:
        """What was decided about the step and each tower."""
        best, wanted = ranked[0], self._layout.schedule
        other = next((a for a in ranked if a.schedule is not best.schedule), None)
        if other is not None:
            tie = "; of equal ones the one that holds less" if best.makespan_ns == other.makespan_ns else ""
            reason = (
                f"simulated {milliseconds(best.makespan_ns)}, {other.schedule} {milliseconds(other.makespan_ns)}{tie}"
            )
        elif best.schedule is not wanted:
            reason = str(refused[wanted])
        else:
            reason = f"as the job asks; simulated {milliseconds(best.makespan_ns)}"
        found = [Decision("step", best.schedule.value, reason)]
        for tower, schedule in zip(self._towers, best.plan.schedules, strict=True):
            if best.balanced and tower.balance is not BalancePolicy.NONE:
                after, before = (self._excess(tower, self._arrange(tower, balanced)) for balanced in (True, False))
                reason = (
                    f"fullest rank of any contrastive batch {after} % above the mean, {before} % in canonical order"
                )
                found.append(Decision(tower.name, "padded" if tower.padded else tower.balance.value, reason))
            free = self._wanted(tower, best.schedule)
            if tower.memory is not None and not np.array_equal(free, schedule.in_flight):
                reason = f"memory holds {tower.memory.units:,} {unit_of(tower)}; {listed(free)} if it were endless"
                found.append(Decision(tower.name, f"in flight: {listed(schedule.in_flight)}", reason))
        return tuple(found)

    def _excess(self, tower: ModuleSpec, arrangement: Arrangement) -> str:
        """Percent by which the fullest rank of a contrastive batch exceeds the mean, padding included, at most."""
        loads = forward_ns(tower.cost, item_sizes(tower, self._samples))
        size = self._layout.microbatches
        cells = sums_with_padding(tower, arrangement, loads, self._num_groups * size)
        table = cells.reshape(tower.dp, self._num_groups, size).sum(axis=2)
        total = np.maximum(table.sum(axis=0), 1)
        tenths = int(((table.max(axis=0) * tower.dp - total) * 1_000 // total).max())
        return f"{tenths // 10}.{tenths % 10}"
