"""Homogeneous plans to compare with: one degree for a whole batch (FlexSP, section 6.1)."""

from bisect import bisect_left, insort

import numpy as np

from dataserver.planning.samples import I64
from dataserver.planning.sequence_parallel.costs import GroupCosts
from dataserver.planning.sequence_parallel.plan import SequencePlan
from dataserver.planning.sequence_parallel.planner import DEFAULT_BUDGET, assemble
from dataserver.planning.sequence_parallel.search import Batch, Budget, Grouping, search


def homogeneous_plan(
    lengths: I64, costs: GroupCosts, degree: int | None = None, fill_percent: int = 90
) -> SequencePlan:
    """Sequences packed best-fit decreasing into groups of one degree: a static plan, as DeepSpeed-Ulysses has it.

    A bin is what one group holds in one microbatch, filled to `fill_percent` of its tokens (a longer sequence has its
    own). Bins that take long run together.

    Args:
        lengths: int64 [n], tokens of each sequence.
        costs: of the model on the cluster.
        degree: of every group; the largest unless given.
        fill_percent: share of a group's tokens that is used.

    Raises:
        ValueError: the degree is none of `costs` or does not divide the cluster, or a sequence does not fit it.
    """
    degree = costs.degrees[-1] if degree is None else degree
    if degree not in costs.degrees or costs.num_devices % degree or not 1 <= fill_percent <= 100:
        raise ValueError(
            f"groups of {degree}, filled to {fill_percent} %, on {costs.num_devices} devices: the degree must be one "
            f"of {costs.degrees} that divides the devices, the percentage from 1 to 100"
        )
    lengths = np.ascontiguousarray(lengths, np.int64)
    column = costs.degrees.index(degree)
    floors = costs.floors(lengths)
    if (floors > column).any():
        longest = int(lengths.argmax())
        raise ValueError(
            f"sequence {longest} has {int(lengths[longest])} tokens and does not fit a group of {degree} devices, "
            f"which holds {degree * costs.device_tokens}: use degree {costs.degrees[floors[longest]]}"
        )
    order = np.argsort(-lengths, kind="stable")
    batch = Batch(lengths[order], costs)
    bins = _best_fit(batch.lengths, degree * costs.device_tokens, fill_percent)
    loads = np.zeros(int(bins.max(initial=-1)) + 1, np.int64)
    np.add.at(loads, bins, batch.times[:, column])
    place = np.empty(len(loads), np.int64)
    place[np.argsort(-loads, kind="stable")] = np.arange(len(loads))
    per = costs.num_devices // degree
    composition = _composition(costs, degree)
    microbatch, group = np.divmod(place[bins], per)
    groupings = []
    for number in range(-(-len(loads) // per)):
        members = np.flatnonzero(microbatch == number)
        ends = np.bincount(group[members], batch.times[members, column]).max()
        groupings.append(Grouping(members, composition, group[members], int(ends)))
    return assemble(batch, order, groupings)


def best_homogeneous_plan(lengths: I64, costs: GroupCosts, fill_percent: int = 90) -> SequencePlan:
    """The fastest homogeneous plan of this batch (FlexSP-BatchAda); ties to the smaller degree.

    Raises:
        ValueError: a sequence fits no group.
    """
    degrees = _possible_degrees(np.ascontiguousarray(lengths, np.int64), costs)
    return min((homogeneous_plan(lengths, costs, d, fill_percent) for d in degrees), key=lambda plan: plan.time_ns)


def searched_homogeneous_plan(lengths: I64, costs: GroupCosts, budget: Budget = DEFAULT_BUDGET) -> SequencePlan:
    """The fastest homogeneous plan that this project's own search finds; ties to the smaller degree.

    A stronger baseline than the published one: what it still loses is what groups of different degrees gain.

    Raises:
        ValueError: a sequence fits no group.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    plans = []
    for degree in _possible_degrees(lengths, costs):
        batch = Batch(lengths[order], costs, _composition(costs, degree)[None, :])
        plans.append(assemble(batch, order, search(batch, budget)))
    return min(plans, key=lambda plan: plan.time_ns)


def _possible_degrees(lengths: I64, costs: GroupCosts) -> list[int]:
    """Degrees that divide the cluster and hold every sequence, ascending."""
    floor = int(costs.floors(lengths).max(initial=0))
    degrees = [d for d in costs.degrees[floor:] if costs.num_devices % d == 0]
    if not degrees:
        raise ValueError(
            f"none of the degrees {costs.degrees[floor:]} that hold a sequence of {int(lengths.max(initial=0))} tokens "
            f"divides {costs.num_devices} devices: there is no homogeneous plan"
        )
    return degrees


def _composition(costs: GroupCosts, degree: int) -> I64:
    """The cluster in groups of one degree, int64 [degrees]."""
    return np.array([costs.num_devices // degree if d == degree else 0 for d in costs.degrees], np.int64)


def _best_fit(lengths: I64, room: int, fill_percent: int) -> I64:
    """Bin of each length (descending): the fullest that has room up to the percentage, the first of those."""
    limit = room * fill_percent // 100
    free: list[tuple[int, int]] = []
    bins, number = np.empty(len(lengths), np.int64), 0
    for item, length in enumerate(lengths.tolist()):
        at = bisect_left(free, (length, 0))
        if at == len(free):
            left, bins[item], number = max(limit - length, 0), number, number + 1
        else:
            left, bins[item] = free[at][0] - length, free[at][1]
            del free[at]
        insort(free, (left, int(bins[item])))
    return bins
