"""Plans of sequence-parallel groups for one batch: what the planner decides, and the search for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.layouts.grouped.batch import Batch, Grouping
from dataserver.planning.layouts.grouped.costs import GroupCosts
from dataserver.planning.layouts.grouped.search import DEFAULT_BUDGET, Budget, search


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Devices that share each of their sequences, and run them one after the other."""

    first_rank: int
    """A multiple of the degree: a group no larger than a node lies inside one."""
    degree: int
    """Number of devices, a power of two."""
    sequences: tuple[int, ...]
    """Indices into the batch's lengths, longest first. Empty: the ranks only take part in what the cluster does
    together."""
    time_ns: int
    """Time of the sequences, without the microbatch's fixed time."""

    @property
    def ranks(self) -> range:
        """The backbone ranks that form the group."""
        return range(self.first_rank, self.first_rank + self.degree)


@dataclass(frozen=True, slots=True)
class GroupedMicrobatch:
    """Sequences that run at once, on groups that make up the whole cluster."""

    groups: tuple[SequenceGroup, ...]
    """Groups in the order of their ranks, the largest degree first."""
    time_ns: int
    """The last group's end, with the microbatch's fixed time."""

    @property
    def composition(self) -> tuple[int, ...]:
        """Degrees of the groups, largest first."""
        return tuple(group.degree for group in self.groups)


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One batch on one cluster."""

    microbatches: tuple[GroupedMicrobatch, ...]
    time_ns: int
    """Sum of the times of all microbatches."""
    bound_ns: int
    """No plan of this cost model takes less."""


def plan_groups(
    lengths: I64, costs: GroupCosts, *, squares: I64 | None = None, budget: Budget = DEFAULT_BUDGET
) -> SequencePlan:
    """Spread a batch over microbatches, and each of them over groups of devices of different degrees.

    Every sequence is placed once, no device holds more tokens than it has room for, and the groups of a microbatch make
    up the whole cluster. The plan depends on the arguments alone.

    Args:
        lengths: int64 [n], tokens of each sequence.
        costs: of the model on the cluster.
        squares: int64 [n], what attention grows with where samples are packed (`GroupCosts.times_ns`).
        budget: what bounds the search.

    Raises:
        ValueError: a sequence fits no group, or no composition exists.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    costs.floors(lengths)  # names a sequence that is too long by its place in the batch
    order = np.argsort(-lengths, kind="stable")
    batch = sorted_batch(lengths, costs, order, squares)
    return assemble(batch, order, search(batch, budget))


def sorted_batch(
    lengths: I64, costs: GroupCosts, order: I64, squares: I64 | None, compositions: I64 | None = None
) -> Batch:
    """The sequences in the `order` [n] of falling lengths."""
    return Batch(lengths[order], costs, compositions, None if squares is None else squares[order])


def assemble(batch: Batch, order: I64, groupings: Sequence[Grouping]) -> SequencePlan:
    """The plan of some groupings; `order` [n] is the batch's index of each sorted sequence."""
    costs = batch.costs
    microbatches = tuple(_microbatch(batch, order, g) for g in groupings)
    bound = batch.fewest * costs.fixed_ns + batch.bound(0, len(batch.lengths))
    return SequencePlan(microbatches, sum(m.time_ns for m in microbatches), bound)


def _microbatch(batch: Batch, order: I64, grouping: Grouping) -> GroupedMicrobatch:
    """Ranks from the largest group down: every group then starts at a multiple of its degree."""
    yield_point()
    columns = np.repeat(np.arange(len(grouping.composition)), grouping.composition)
    by_group = np.argsort(grouping.group, kind="stable")
    starts = np.searchsorted(grouping.group[by_group], np.arange(len(columns) + 1)).tolist()
    indices = tuple(order[grouping.members[by_group]].tolist())
    times = np.zeros(len(columns), np.int64)
    np.add.at(times, grouping.group, batch.times[grouping.members, columns[grouping.group]])
    groups, rank = [], 0
    for number in range(len(columns) - 1, -1, -1):
        degree = batch.costs.degrees[columns[number]]
        sequences = indices[starts[number] : starts[number + 1]]
        groups.append(SequenceGroup(rank, degree, sequences, int(times[number])))
        rank += degree
    return GroupedMicrobatch(tuple(groups), batch.costs.fixed_ns + max(g.time_ns for g in groups))
