"""A plan without what follows from it: from the positions of a step's items, the rest is made again."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import bin_loads
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.job.limits import most_microbatches
from dataserver.planning.plan.arranging import arrange_and_route, arrange_items, arrange_sequences, images_beside
from dataserver.planning.plan.expectation import item_sizes
from dataserver.planning.plan.plan import (
    ArrangedStep,
    Arrangement,
    Candidate,
    Decision,
    ModuleSchedule,
    RankGroups,
    Routing,
    StepPlan,
    make_plan,
)
from dataserver.planning.stream.samples import StepSamples


class UnfitPlanError(ValueError):
    """A compact plan that is none of the step's; the message says what does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Where each of a module's k samples or images is, in canonical order. int64 [k] each."""

    rank: I64
    microbatch: I64
    slot: I64
    """Backbone: sequence slot within the microbatch. Elsewhere it follows, and is left out: int64 [0]."""


NO_SLOTS: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class CompactPlan:
    """What was decided about a step, its samples being known."""

    num_microbatches: int
    sequences_per_microbatch: int
    positions: tuple[Positions, ...]
    """One for each module, in the order of the job's module list."""
    schedules: tuple[ModuleSchedule, ...]
    groups: RankGroups
    candidates: tuple[Candidate, ...] = ()
    decisions: tuple[Decision, ...] = ()


def compact(job: Job, plan: StepPlan) -> CompactPlan:
    """The compact form of a plan of a job."""
    return CompactPlan(
        num_microbatches=plan.num_microbatches,
        sequences_per_microbatch=plan.sequences_per_microbatch,
        positions=tuple(map(_positions, job.spec.execution.modules, plan.arrangements)),
        schedules=plan.schedules,
        groups=plan.groups,
        candidates=plan.candidates,
        decisions=plan.decisions,
    )


def expand(job: Job, step: int, samples: StepSamples, found: CompactPlan) -> StepPlan:
    """The plan of a step, made again from its compact form, whoever that comes from.

    Whatever it says, every item ends up in one place that its module has, every sequence fits `seq_len`, and routings
    and rows follow from the positions. Whether these are what planning chooses, only the plan's hash tells.

    Raises:
        UnfitPlanError: it is no plan of these samples.
    """
    execution = job.spec.execution
    _check_count("microbatches", found.num_microbatches, 1, most_microbatches(execution))
    _check_count("sequence slots", found.sequences_per_microbatch, 0, max(execution.microbatch, len(samples)))
    _require(len(found.positions) == len(execution.modules), f"it has positions for {len(found.positions)} modules")
    _check_schedules(job, found)
    arrangements, routings = _arranged(job, samples, found)
    _check_groups(job, found)
    arranged = ArrangedStep(
        samples=samples,
        num_microbatches=found.num_microbatches,
        sequences_per_microbatch=found.sequences_per_microbatch,
        arrangements=arrangements,
        routings=routings,
        schedules=found.schedules,
        groups=found.groups,
    )
    return replace(make_plan(job, step, arranged), candidates=found.candidates, decisions=found.decisions)


def _positions(module: ModuleSpec, arrangement: Arrangement) -> Positions:
    order = np.argsort(arrangement.item)
    slot = arrangement.slot[order] if module.kind is ModuleKind.BACKBONE else NO_SLOTS
    return Positions(arrangement.rank[order], arrangement.microbatch[order], slot)


def _arranged(
    job: Job, samples: StepSamples, found: CompactPlan
) -> tuple[tuple[Arrangement, ...], tuple[Routing, ...]]:
    """Arrangements in the order of the job's modules, and routings in the same order; raises UnfitPlanError."""
    execution, routings = job.spec.execution, list[Routing]()
    made = dict[str, Arrangement]()
    positions = {m.name: p for m, p in zip(execution.modules, found.positions, strict=True)}
    for module in execution.modules:
        here = positions[module.name]
        if module.kind is ModuleKind.BACKBONE:
            _check_positions(module, here, len(samples), found)
            _check_sequences(job, here, samples, found)
            made[module.name] = arrange_sequences(module, samples, here.rank, here.microbatch, here.slot)
        elif not module.handles_images:
            sizes = item_sizes(module, samples)
            _check_positions(module, here, len(sizes), found)
            made[module.name] = arrange_items(module, sizes, here.rank, here.microbatch)
    for module in execution.modules:
        if module.handles_images:
            here, backbone = positions[module.name], made[execution.backbone.name]
            beside = images_beside(job.spec, module, samples, backbone)
            _check_positions(module, here, len(beside.item), found)
            at = here.rank[beside.item], here.microbatch[beside.item]
            made[module.name], routing = arrange_and_route(module, backbone, beside, *at)
            routings.append(routing)
    return tuple(made[m.name] for m in execution.modules), tuple(routings)


def _check_positions(module: ModuleSpec, positions: Positions, count: int, found: CompactPlan) -> None:
    name = f"of module {module.name}"
    _require(
        len(positions.rank) == len(positions.microbatch) == count,
        f"it places {len(positions.rank)} items {name}, not {count}",
    )
    _check_range(f"ranks {name}", positions.rank, module.dp)
    _check_range(f"microbatches {name}", positions.microbatch, found.num_microbatches)


def _check_sequences(job: Job, positions: Positions, samples: StepSamples, found: CompactPlan) -> None:
    """Check where the backbone has its sequences, ranks and microbatches being in range."""
    _require(len(positions.slot) == len(samples), f"it has {len(positions.slot)} slots of samples, not {len(samples)}")
    _check_range("slots of samples", positions.slot, found.sequences_per_microbatch)
    sequence = (
        positions.rank * found.num_microbatches + positions.microbatch
    ) * found.sequences_per_microbatch + positions.slot
    used, number = np.unique(sequence, return_inverse=True)  # there may be places for very many more
    longest = int(bin_loads(samples.tokens, number, len(used)).max(initial=0))
    _require(longest <= job.stream.seq_len, f"a sequence has {longest} tokens, and seq_len is {job.stream.seq_len}")


def _check_schedules(job: Job, found: CompactPlan) -> None:
    names = [(m.name, m.pp) for m in job.spec.execution.modules]
    said = [(s.module, len(s.in_flight)) for s in found.schedules]
    _require(said == names, "its schedules are not those of the job's modules and stages")
    for schedule in found.schedules:
        chunks = (1, job.spec.execution.layout.num_chunks)
        _require(schedule.chunks in chunks, f"module {schedule.module} has {schedule.chunks} chunks")
        _require(schedule.drain_every >= 0, f"module {schedule.module} drains after {schedule.drain_every}")
        _require(bool((schedule.in_flight >= 1).all()), f"module {schedule.module} holds nothing in flight")


def _check_groups(job: Job, found: CompactPlan) -> None:
    """Groups of a microbatch make up all ranks of their module, and its items are with their first ranks."""
    groups, execution = found.groups, job.spec.execution
    _require(len(groups.microbatch) == len(groups.first_rank) == len(groups.degree), "its groups have unequal fields")
    if not groups.module:
        _require(not len(groups.degree), "it has groups of no module")
        return
    _require(groups.module in {m.name for m in execution.modules}, "it has groups of a module that is not in the job")
    dp, name = execution.module(groups.module).dp, f"groups of module {groups.module}"
    _check_range(f"microbatches of {name}", groups.microbatch, found.num_microbatches)
    _check_range(f"first ranks of {name}", groups.first_rank, dp)
    _check_range(f"degrees of {name}", groups.degree, dp + 1)
    first = groups.microbatch * dp + groups.first_rank
    whole = np.concatenate([first, [found.num_microbatches * dp]])
    _require(
        bool(len(first))
        and first[0] == 0
        and bool((np.diff(whole) == groups.degree).all())
        and bool((groups.degree > 0).all())
        and bool((groups.first_rank + groups.degree <= dp).all()),
        f"{name} do not make up its {dp} ranks in each of {found.num_microbatches} microbatches",
    )
    positions = found.positions[[m.name for m in execution.modules].index(groups.module)]
    held = np.isin(positions.microbatch * dp + positions.rank, first)
    _require(bool(held.all()), f"items of module {groups.module} are with ranks that are not the first of a group")


def _check_range(what: str, values: I64, below: int) -> None:
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < below):
        raise UnfitPlanError(f"{what} are {int(values.min())} to {int(values.max())}; 0 to {below - 1} are there")


def _check_count(what: str, value: int, least: int, most: int) -> None:
    _require(least <= value <= most, f"it has {value} {what}; {least} to {most} may be")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UnfitPlanError(otherwise)
