"""Contrastive groups as barriers: items are balanced inside their group only."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning.balancing import Balancer, searched
from dataserver.planning.samples import I64


@dataclass(frozen=True, slots=True)
class GroupedArrangement:
    """Where each of n items of a step goes in one tower."""

    rank: I64
    """int64 [n]: data-parallel rank."""
    microbatch: I64
    """int64 [n]: number within the step; a group has consecutive microbatches, the groups stand in their order."""


def contrastive_groups(num_items: int, batch: int) -> I64:
    """The group of each item: runs of `batch` items in canonical order. int64 [num_items].

    Raises:
        ValueError: the items do not divide into whole groups.
    """
    if batch < 1 or num_items % batch:
        raise ValueError(
            f"{num_items} items do not divide into contrastive batches of {batch}; a smaller batch would have fewer "
            "negatives, so use a multiple"
        )
    return np.arange(num_items, dtype=np.int64) // batch


def balance_groups(
    loads: I64, group: I64, num_ranks: int, microbatches_per_group: int, balancer: Balancer = searched
) -> GroupedArrangement:
    """Spread the items of every group over ranks, and those of each rank over the group's microbatches.

    No item leaves its group: another group would give it other negatives (DISTMM, section 4.1). In a group all ranks
    and microbatches hold equal counts. Each tower calls this with its own loads and ranks.

    Args:
        loads: int64 [n]: cost of each item in this tower.
        group: int64 [n]: group of each item, 0, 1, ... without gaps.
        num_ranks: data-parallel ranks of the tower.
        microbatches_per_group: K of section 4.3.
        balancer: see `balancing.BALANCERS`.

    Raises:
        ValueError: the items of a group do not divide evenly, or the shapes do not fit.
    """
    if len(loads) != len(group) or num_ranks < 1 or microbatches_per_group < 1:
        raise ValueError(
            f"{len(loads)} loads and {len(group)} groups on {num_ranks} ranks in {microbatches_per_group} "
            "microbatches; one group for each load, one rank and one microbatch at least are required"
        )
    if len(group) and group.min() < 0:
        raise ValueError(f"found group {int(group.min())}; groups count from 0")
    rank, microbatch = np.zeros(len(loads), np.int64), np.zeros(len(loads), np.int64)
    places = num_ranks * microbatches_per_group
    for number, count in enumerate(np.bincount(group).tolist()):
        if not count or count % places:
            raise ValueError(
                f"contrastive group {number} has {count} items; {num_ranks} ranks x {microbatches_per_group} "
                f"microbatches need a multiple of {places}"
            )
        mine = np.flatnonzero(group == number)
        rank[mine] = balancer(loads[mine], num_ranks, count // num_ranks)
        for r in range(num_ranks):
            here = mine[rank[mine] == r]
            within = balancer(loads[here], microbatches_per_group, count // places)
            microbatch[here] = number * microbatches_per_group + within
    return GroupedArrangement(rank, microbatch)
