"""The microbatches of each rank in a phase."""

import numpy as np

from dataserver.planning.balancing import Balancer, Memory, bin_totals, check, in_runs
from dataserver.planning.packing import number_by_first
from dataserver.planning.samples import I64
from dataserver.planning.sizing import MicrobatchTooLargeError


class NoRoomError(MicrobatchTooLargeError):
    """So many microbatches are too few for the memory of a module; more may do."""


def fits(needs: I64, place: I64, count: int, memory: Memory | None, *, padded: bool) -> bool:
    """Whether every one of `count` places keeps the memory, `place` int64 [k] being that of each item."""
    return memory is None or int(bin_totals(needs, place, count, padded=padded).max()) <= memory.cap


def runs(loads: I64, num_bins: int, capacity: int | None = None, memory: Memory | None = None) -> I64:
    """The baseline as a `Balancer`: items in their order, dealt out in runs.

    Raises:
        ValueError: that exceeds the memory, or there are too many items.
    """
    check(loads, num_bins, capacity, memory)
    bins = in_runs(len(loads), num_bins)
    if memory is not None and not fits(memory.need, bins, num_bins, memory, padded=False):
        raise NoRoomError(f"{len(loads)} items in canonical order exceed the memory of {num_bins} bins")
    return bins


def split_ranks(
    balancer: Balancer, loads: I64, rank: I64, ranks: int, microbatches: int, slots: int | None, memory: Memory | None
) -> I64:
    """The microbatch of each item within its rank, numbered in the order of their first items. int64 [k].

    In a phase that runs alone it makes no rank faster how its items are divided, since nobody waits for a microbatch.
    It decides what the rank has to hold at once.

    Args:
        balancer: spreads the items of a rank.
        loads: int64 [k], nanoseconds of each item.
        rank: int64 [k], the rank of each.
        ranks: their number.
        microbatches: of each rank.
        slots: items that a microbatch holds at most.
        memory: of one microbatch.

    Raises:
        ValueError: the items of a rank do not fit its microbatches, or no way to fit them was found.
    """
    found = np.zeros_like(rank)
    for mine in _of_ranks(rank, ranks):
        here = None if memory is None else Memory(memory.need[mine], memory.cap)
        found[mine] = number_by_first(balancer(loads[mine], microbatches, slots, here))
    return found


def _of_ranks(rank: I64, ranks: int) -> list[I64]:
    """The items of each rank in their order."""
    order = np.argsort(rank, kind="stable")
    return np.split(order, np.searchsorted(rank[order], np.arange(1, ranks)))
