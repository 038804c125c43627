"""Homogeneous plans to compare with: one degree for a whole batch (FlexSP, section 6.1)."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import plain
from dataserver.planning.layouts.grouped.batch import Grouping
from dataserver.planning.layouts.grouped.costs import GroupCosts
from dataserver.planning.layouts.grouped.search import DEFAULT_BUDGET, Budget, search
from dataserver.planning.layouts.grouped.sequence_plan import SequencePlan, assemble, sorted_batch
from dataserver.planning.stream.packing import MAX_SEQ_LEN

FILL_PERCENT = 90
"""Share of a group's tokens that is used, as in the public code of FlexSP."""

SPREAD_FROM = 16
"""Least degree whose groups share the last microbatch evenly, as in the public code of FlexSP."""


def homogeneous_plan(
    lengths: I64, costs: GroupCosts, degree: int | None = None, squares: I64 | None = None
) -> SequencePlan:
    """Sequences packed best-fit decreasing into groups of one degree: a static plan, as DeepSpeed-Ulysses has it.

    As in the public code of FlexSP (methods `static` and `adaptive` of its solver): a bin is what one group holds in
    one microbatch, filled to `FILL_PERCENT` of its tokens, or to the longest sequence if that is more. Bins run in
    the order in which they were opened. Groups that the last microbatch leaves idle take one sequence each from groups
    before them; from degree `SPREAD_FROM` on, the groups of that microbatch then share its tokens evenly.

    Args:
        lengths: int64 [n], tokens of each sequence.
        costs: of the model on the cluster.
        degree: of every group; the largest unless given.
        squares: int64 [n], see `GroupCosts.times_ns`.

    Raises:
        ValueError: the degree is none of `costs` or does not divide the cluster, or a sequence does not fit it.
    """
    degree = costs.degrees[-1] if degree is None else degree
    if degree not in costs.degrees or costs.num_devices % degree:
        raise ValueError(
            f"groups of {degree} on {costs.num_devices} devices: the degree must be one of {costs.degrees} that "
            "divides the devices"
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
    order, composition = np.argsort(-lengths, kind="stable"), _composition(costs, degree)
    batch = sorted_batch(lengths, costs, order, squares, composition[None, :])
    per = costs.num_devices // degree
    microbatch, group = np.divmod(_packed(lengths, order, degree, costs)[order], per)
    groupings = []
    for number in range(int(microbatch.max(initial=-1)) + 1):
        members = np.flatnonzero(microbatch == number)
        ends = np.bincount(group[members], batch.times[members, column]).max()
        groupings.append(Grouping(members, composition, group[members], int(ends)))
    return assemble(batch, order, groupings)


def best_homogeneous_plan(lengths: I64, costs: GroupCosts, squares: I64 | None = None) -> SequencePlan:
    """The fastest homogeneous plan of this batch (FlexSP-BatchAda); ties to the smaller degree.

    Raises:
        ValueError: a sequence fits no group.
    """
    degrees = _possible_degrees(np.ascontiguousarray(lengths, np.int64), costs)
    plans = (homogeneous_plan(lengths, costs, d, squares) for d in degrees)
    return min(plans, key=lambda plan: plan.time_ns)


def searched_homogeneous_plan(
    lengths: I64, costs: GroupCosts, budget: Budget = DEFAULT_BUDGET, squares: I64 | None = None
) -> SequencePlan:
    """The fastest homogeneous plan that this project's own search finds; ties to the smaller degree.

    A stronger baseline than the published one: what it still loses is what groups of different degrees gain.

    Raises:
        ValueError: a sequence fits no group.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    plans = []
    for degree in _possible_degrees(lengths, costs):
        batch = sorted_batch(lengths, costs, order, squares, _composition(costs, degree)[None, :])
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


def _packed(lengths: I64, order: I64, degree: int, costs: GroupCosts) -> I64:
    """The bin of each sequence, bin b being group b % per of microbatch b // per. int64 [n]."""
    from dataserver.planning.kernels import packing

    limit = max(degree * costs.device_tokens * FILL_PERCENT // 100, int(lengths.max(initial=0)))
    limit = min(limit, int(lengths.sum()), MAX_SEQ_LEN)  # the kernel counts no further
    per = costs.num_devices // degree
    bins = packing.best_fit(plain(lengths), order, limit)
    by_bin = np.split(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins))[:-1])
    groups = [members.tolist() for members in by_bin]
    idle = -len(groups) % per
    _give_idle_groups_one(groups, idle)
    if idle and degree >= SPREAD_FROM:
        _share_evenly(groups[-per:], lengths.tolist(), limit)
    for b, members in enumerate(groups):
        bins[members] = b
    return bins


def _give_idle_groups_one(groups: list[list[int]], idle: int) -> None:
    """Append `idle` groups, each with the first sequence of the last group before them that has several."""
    used = groups.copy()
    for _ in range(idle):
        giver = next((members for members in reversed(used) if len(members) > 1), None)
        groups.append([giver.pop(0)] if giver else [])


def _share_evenly(groups: list[list[int]], lengths: list[int], limit: int) -> None:
    """Move sequences from groups above an even share of the tokens to later ones below it."""
    tokens = [sum(lengths[k] for k in members) for members in groups]
    share = sum(tokens) // len(groups)
    for taker in range(1, len(groups)):
        for giver in range(taker):
            for k in sorted(groups[giver]):
                if tokens[taker] >= share or tokens[giver] <= share or len(groups[giver]) == 1:
                    break
                if tokens[taker] + lengths[k] <= limit:
                    groups[giver].remove(k)
                    groups[taker].append(k)
                    tokens[giver] -= lengths[k]
                    tokens[taker] += lengths[k]
