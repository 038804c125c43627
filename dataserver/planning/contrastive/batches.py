"""Contrastive groups as barriers: items are balanced inside their group only."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dataserver.planning.balancing import Balancer, BinRoom, in_runs, longest_first, padded, searched
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
    loads: I64,
    group: I64,
    num_ranks: int,
    microbatches_per_group: int,
    balancer: Balancer = searched,
    room: BinRoom | None = None,
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
        room: need of each item, and what a rank has for its items of one group: it holds them all at the barrier.

    Raises:
        BinRoomError: no way was found to keep the memory.
        ValueError: the items of a group do not divide evenly, or the shapes do not fit.
    """
    rank, microbatch = np.zeros(len(loads), np.int64), np.zeros(len(loads), np.int64)
    for number, mine in enumerate(_members(loads, group, num_ranks, microbatches_per_group)):
        here = None if room is None else BinRoom(room.need[mine], room.cap)
        rank[mine] = balancer(loads[mine], num_ranks, len(mine) // num_ranks, here)
        for r in range(num_ranks):
            part = mine[rank[mine] == r]
            within = balancer(loads[part], microbatches_per_group, len(part) // microbatches_per_group)
            microbatch[part] = number * microbatches_per_group + within
    return GroupedArrangement(rank, microbatch)


def groups_in_order(loads: I64, group: I64, num_ranks: int, microbatches_per_group: int) -> GroupedArrangement:
    """The baseline: the items of every group in their order, dealt out in runs to rank by rank.

    Arguments and errors are those of `balance_groups`.
    """
    rank, microbatch = np.zeros(len(loads), np.int64), np.zeros(len(loads), np.int64)
    for number, mine in enumerate(_members(loads, group, num_ranks, microbatches_per_group)):
        rank[mine], within = np.divmod(in_runs(len(mine), num_ranks * microbatches_per_group), microbatches_per_group)
        microbatch[mine] = number * microbatches_per_group + within
    return GroupedArrangement(rank, microbatch)


def pad_groups(
    loads: I64, group: I64, num_ranks: int, microbatches_per_group: int, room: BinRoom | None = None
) -> GroupedArrangement:
    """The same for towers whose items are padded to the largest of their microbatch.

    The items of a group, sorted, are cut into microbatches of equal counts, which makes the sum of their largest items
    as small as can be; these are spread over ranks, longest first. Loads are those of `costs.forward_ns`.

    Arguments and errors are those of `balance_groups`; a microbatch needs count x largest need of memory.
    """
    rank, microbatch = np.zeros(len(loads), np.int64), np.zeros(len(loads), np.int64)
    for number, mine in enumerate(_members(loads, group, num_ranks, microbatches_per_group)):
        cells = num_ranks * microbatches_per_group
        cell = padded(loads[mine], cells, len(mine) // cells)
        longest = np.zeros(cells, np.int64)
        np.maximum.at(longest, cell, loads[mine])
        rank_of = longest_first(longest, num_ranks, microbatches_per_group, _of_cells(room, mine, cell, cells))
        order = np.argsort(rank_of, kind="stable")
        within = np.empty(cells, np.int64)
        within[order] = np.arange(cells) % microbatches_per_group
        rank[mine], microbatch[mine] = rank_of[cell], number * microbatches_per_group + within[cell]
    return GroupedArrangement(rank, microbatch)


def deal_by_size(
    sizes: I64, group: I64, num_ranks: int, microbatches_per_group: int, padded: bool
) -> GroupedArrangement:
    """The items of every group, largest first, dealt out to the ranks in turn; padded ones a whole microbatch at once.

    What the fullest rank holds then follows from the sizes alone and grows with each of them (`barrier_units`).

    Arguments and errors are those of `balance_groups`.
    """
    rank, microbatch = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    for number, mine in enumerate(_members(sizes, group, num_ranks, microbatches_per_group)):
        together = len(mine) // (num_ranks * microbatches_per_group) if padded else 1
        turn, rank_of = np.divmod(np.arange(len(mine)) // together, num_ranks)
        ordered = mine[np.argsort(-sizes[mine], kind="stable")]
        rank[ordered] = rank_of
        microbatch[ordered] = number * microbatches_per_group + turn % microbatches_per_group
    return GroupedArrangement(rank, microbatch)


def barrier_units(
    sizes: I64, num_ranks: int, microbatches_per_group: int, padded: bool = False, in_order: bool = False
) -> int:
    """What the fullest rank holds at the barrier at most, padding included, whatever the order of the samples.

    Under `deal_by_size` exactly the most, or, with `in_order`, under `groups_in_order`. A group whose items are each at
    most as large as those given needs no more.

    Args:
        sizes: int64 [groups, items]: patches or tokens of the items of each group, which divide evenly.
        num_ranks: data-parallel ranks of the tower.
        microbatches_per_group: K of section 4.3.
        padded: whether the items of a microbatch are padded to its largest.
        in_order: whether items are dealt out in canonical order, so that one rank may have all of the largest.
    """
    count = sizes.shape[1] // num_ranks
    together = count // microbatches_per_group if padded else 1
    apart = 1 if in_order else num_ranks * together
    ordered = -np.sort(-sizes, axis=1)
    return together * int(ordered[:, : apart * (count // together) : apart].sum(axis=1).max(initial=0))


def _of_cells(room: BinRoom | None, mine: I64, cell: I64, cells: int) -> BinRoom | None:
    """The memory of microbatches of padded items."""
    if room is None:
        return None
    largest = np.zeros(cells, np.int64)
    np.maximum.at(largest, cell, room.need[mine])
    return BinRoom(largest * (len(mine) // cells), room.cap)


def _members(loads: I64, group: I64, num_ranks: int, microbatches_per_group: int) -> Iterator[I64]:
    """The items of each group, in the order of the groups, after checking that they can be spread evenly."""
    if len(loads) != len(group) or num_ranks < 1 or microbatches_per_group < 1:
        raise ValueError(
            f"{len(loads)} loads and {len(group)} groups on {num_ranks} ranks in {microbatches_per_group} "
            "microbatches; one group for each load, one rank and one microbatch at least are required"
        )
    if len(group) and group.min() < 0:
        raise ValueError(f"found group {int(group.min())}; groups count from 0")
    places = num_ranks * microbatches_per_group
    for number, count in enumerate(np.bincount(group).tolist()):
        if not count or count % places:
            raise ValueError(
                f"contrastive group {number} has {count} items; {num_ranks} ranks x {microbatches_per_group} "
                f"microbatches need a multiple of {places}"
            )
        yield np.flatnonzero(group == number)
