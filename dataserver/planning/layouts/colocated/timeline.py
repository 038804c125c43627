"""The phases of a colocated step one after the other, with a barrier behind each: its time, exactly."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import bin_totals, lower_bound, padded
from dataserver.planning.costs.model import backward_ns
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.layouts.colocated.items import ModuleItems, module_items
from dataserver.planning.layouts.colocated.programs import first_pass, programs, step_phases
from dataserver.planning.layouts.colocated.transfers import phase_transfers, transfers_before
from dataserver.planning.layouts.interface import Node, PlannedTimeline
from dataserver.planning.layouts.shared.sequences import sequence_of_samples
from dataserver.planning.plan.expectation import held_units, microbatch_loads
from dataserver.planning.plan.plan import ArrangedStep, round_size
from dataserver.planning.simulation import Operations, Pipeline, Timeline, held_bytes, pass_times


def timeline(spec: JobSpec, plan: ArrangedStep) -> PlannedTimeline:
    """Simulate a plan: every rank runs every phase, and begins the next when all ranks are done with it and with its
    transfers.

    The pipeline of the result has one node for each rank, whose chunks are the modules, and no edges: what a rank waits
    for are the barriers.
    """
    execution = spec.execution
    modules = execution.by_depth
    size = round_size(plan.schedules, plan.num_microbatches)
    phases = step_phases(execution, plan.num_microbatches, size)
    (program,) = programs(execution, plan.schedules, plan.num_microbatches)
    forward = np.stack([microbatch_loads(m, plan) for m in modules], axis=1)
    backward = np.stack([backward_ns(m.cost, forward[:, c]) for c, m in enumerate(modules)], axis=1)
    unit_bytes = [0 if m.memory is None else m.memory.unit_bytes for m in modules]
    held = np.stack([held_units(m, plan) * b for m, b in zip(modules, unit_bytes, strict=True)], axis=1)
    ranks, shape = len(forward), (-1, plan.num_microbatches)
    pipeline = Pipeline(
        num_stages=1,
        stage=np.zeros(ranks, np.int64),
        forward_ns=forward.reshape(shape),
        backward_ns=backward.reshape(shape),
        edges=np.zeros((0, 3), np.int64),
        operations=[program.operations],
        num_chunks=len(modules),
        activation_bytes=held.reshape(shape),
    )
    nodes = tuple(Node(tuple(m.name for m in modules), r, 0) for r in range(ranks))
    transfers = transfers_before(execution, phases, size, phase_transfers(execution, plan))
    return PlannedTimeline(nodes, pipeline, run_phases(phases, forward, backward, held, transfers))


def run_phases(phases: Sequence[Operations], forward: I64, backward: I64, held: I64, transfers: I64) -> Timeline:
    """What happens when.

    Args:
        phases: what every rank does, without a pause within a phase.
        forward: int64 [ranks, modules, microbatches], nanoseconds.
        backward: the same of the backward passes.
        held: the same in bytes, from a forward to its backward; without one until the forward ends.
        transfers: int64 [phases], nanoseconds before the first pass of each phase in which no rank computes.
    """
    operations = Operations.joined(phases)
    times = pass_times(operations, forward, backward)
    ranks, length = times.shape
    own = np.arange(ranks) * length
    start, cause = np.empty_like(times), own[:, None] + np.arange(-1, length - 1)
    now, first, before = 0, 0, np.full(ranks, -1, np.int64)
    for phase, transfer in zip(phases, transfers.tolist(), strict=True):
        arrived = np.where(np.arange(len(phase)) < first_pass(phase), 0, transfer)
        last = first + len(phase)
        ends = now + arrived + times[:, first:last].cumsum(axis=1)
        start[:, first:last] = ends - times[:, first:last]
        cause[:, first] = before
        slowest = int(ends[:, -1].argmax())
        now = int(ends[slowest, -1])
        before = np.where(ends[:, -1] == now, own, own[slowest]) + last - 1
        first = last
    return Timeline(
        makespan_ns=now,
        start_ns=start,
        end_ns=start + times,
        busy_ns=times.sum(axis=1),
        peak_bytes=held_bytes(operations, held).max(axis=1),
        cause=cause,
    )


def bound_ns(job: Job, plan: ArrangedStep) -> int:
    """A time that no arrangement of the plan's sequences in as many microbatches and rounds can beat.

    Since all ranks meet at the end of every phase, the least times of the phases and of the transfers add up.
    """
    execution, count = job.spec.execution, plan.num_microbatches
    sequence, size = sequence_of_samples(plan, execution.backbone.name), round_size(plan.schedules, count)
    transfers = transfers_before(
        execution, step_phases(execution, count, size), size, phase_transfers(execution, plan, least=True)
    )
    return int(transfers.sum()) + sum(_bound(items, count) for items in module_items(job.spec, plan.samples, sequence))


def _bound(items: ModuleItems, microbatches: int) -> int:
    """Time of the slowest rank in the phases of one module."""
    cost = items.module.cost
    slowest = _forward_bound(items, microbatches)
    rounded = microbatches - 1 if cost.backward_percent % 100 else 0  # every microbatch is rounded down for itself
    return slowest + max(0, int(backward_ns(cost, np.array(slowest))) - rounded)


def _forward_bound(items: ModuleItems, microbatches: int) -> int:
    """Forward time that the slowest rank of no arrangement falls below."""
    module, slots, count = items.module, items.slots, items.module.dp * microbatches
    bound = lower_bound(items.loads, module.dp, None if slots is None else slots * microbatches)
    if module.padded and not _evenly_within(items, count, bound):  # the least possible maximum of a single microbatch
        batch = padded(items.loads, count, slots, items.budget())
        bound = max(bound, int(bin_totals(items.loads, batch, count, padded=True).max()))
    return microbatches * module.cost.microbatch_ns + bound


def _evenly_within(items: ModuleItems, count: int, bound: int) -> bool:
    """Whether any items, equally many in each of so many microbatches, have memory and take no longer than a bound:
    then the least possible maximum of a padded microbatch is no larger, and need not be searched for."""
    each, budget = -(-len(items.loads) // count), items.budget()
    return each * int(items.loads.max(initial=0)) <= bound and (
        budget is None or each * int(budget.need.max(initial=0)) <= budget.cap
    )
