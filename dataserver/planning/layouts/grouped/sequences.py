"""What the groups of a plan cost and hold, from the costs of the job's backbone."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import bin_loads
from dataserver.planning.job.fields import Cost, ModuleKind, ModuleSpec
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.grouped.costs import GroupCosts
from dataserver.planning.layouts.grouped.options import GroupedOptions
from dataserver.planning.plan.expectation import held_units, microbatch_loads
from dataserver.planning.plan.plan import ArrangedStep


def group_costs(execution: Execution) -> GroupCosts:
    """Costs of the groups of the backbone, forward and backward together, rounded down."""
    groups, module = execution.options(GroupedOptions), execution.backbone
    if module.memory is None:
        raise TypeError(f"module {module.name} has no memory, without which no grouped job is accepted")
    passes = 2 if module.runs_backward else 1
    exchange = {1: 0} | {e.degree: e.unit_ps * passes // 2 for e in groups.exchange}
    cost, linear_ps = module.cost, _both(module.cost, module.cost.linear_ps)
    return GroupCosts(
        name=f"module {module.name}",
        num_devices=module.dp,
        degrees=groups.group_degrees,
        device_tokens=module.memory.units,
        quadratic_fs=_both(cost, cost.quadratic_fs),
        token_ps=tuple(linear_ps + exchange[d] for d in groups.group_degrees),
        fixed_ns=_both(cost, cost.microbatch_ns),
    )


def _both(cost: Cost, forward: int) -> int:
    """Forward and backward of what a forward costs."""
    return forward * (100 + cost.backward_percent) // 100


@dataclass(frozen=True, slots=True)
class PlannedSequences:
    """The n sequences of a plan, by group and slot."""

    lengths: I64
    """int64 [n]: tokens of each sequence."""
    squares: I64
    """int64 [n], the squares of the tokens of their samples."""
    group: I64
    """int64 [n], index into the plan's groups."""


def planned_sequences(module: ModuleSpec, plan: ArrangedStep) -> PlannedSequences:
    """The sequences of a grouped backbone."""
    found, groups = plan.arrangement(module.name), plan.groups
    of_group = np.searchsorted(
        groups.microbatch * module.dp + groups.first_rank, found.microbatch * module.dp + found.rank
    )
    place, sequence = np.unique(of_group * plan.sequences_per_microbatch + found.slot, return_inverse=True)
    tokens = plan.samples.tokens[found.item]
    lengths, squares = (bin_loads(values, sequence, len(place)) for values in (tokens, tokens * tokens))
    return PlannedSequences(lengths, squares, place // plan.sequences_per_microbatch)


def group_times_ns(execution: Execution, plan: ArrangedStep) -> I64:
    """Forward and backward of each group of a plan, with what every microbatch costs. int64 [groups]."""
    costs, sequences = group_costs(execution), planned_sequences(execution.backbone, plan)
    column = np.searchsorted(np.array(costs.degrees), plan.groups.degree)
    all_degrees = costs.times_ns(sequences.lengths, sequences.squares)
    times = all_degrees[np.arange(len(all_degrees)), column[sequences.group]]
    return costs.fixed_ns + bin_loads(times, sequences.group, len(column))


def rank_times_ns(execution: Execution, plan: ArrangedStep) -> tuple[I64, I64]:
    """Forward and backward of every rank of a grouped backbone, which take the time of their groups.

    Returns:
        int64 [dp, microbatches] each; their sum is the time of the group, to the nanosecond.
    """
    times = _of_ranks(plan, group_times_ns(execution, plan))
    forward: I64 = times * 100 // (100 + execution.backbone.cost.backward_percent)
    return forward, times - forward


def rank_tokens(execution: Execution, plan: ArrangedStep) -> I64:
    """Tokens that every rank holds: its part of the sequences of its group. int64 [dp, microbatches]."""
    sequences = planned_sequences(execution.backbone, plan)
    tokens = bin_loads(sequences.lengths, sequences.group, len(plan.groups.degree))
    return _of_ranks(plan, -(-tokens // plan.groups.degree))


def units_held(execution: Execution, module: ModuleSpec, plan: ArrangedStep) -> I64:
    """Tokens or patches of every microbatch of a module on one device. int64 [dp, microbatches]."""
    return rank_tokens(execution, plan) if module.kind is ModuleKind.BACKBONE else held_units(module, plan)


def _of_ranks(plan: ArrangedStep, values: I64) -> I64:
    """The value of each rank's group in every microbatch. int64 [dp, microbatches]."""
    return np.repeat(values, plan.groups.degree).reshape(plan.num_microbatches, -1).T


def loads(execution: Execution, plan: ArrangedStep) -> dict[str, I64]:
    """For each module int64 [dp, microbatches]: forward time; ranks of the backbone take the time of their groups."""
    others = {m.name: microbatch_loads(m, plan) for m in execution.modules if m.name != execution.backbone.name}
    return {execution.backbone.name: rank_times_ns(execution, plan)[0], **others}
