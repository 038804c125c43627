"""Local search over an assignment of items to bins: exchanges between the heaviest bin and lighter ones, and kicks."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64
from dataserver.planning.kernels.arrays import copy_to
from dataserver.planning.kernels.compiler import inlined_part, kernel, part
from dataserver.planning.kernels.heap import sort_by

SLACK = 8
"""Items that a bin may gain beyond those it starts with."""


class Items(NamedTuple):
    """What is to be placed."""

    load: I64
    """int64 [n]: load of each item."""
    memory: I64
    """int64 [n]: the second resource, zeros if there is none."""
    order: I64
    """int64 [n]: the items from the heaviest on."""


class Bins(NamedTuple):
    """An assignment under change. The items of a bin stand together in `member` and `value`, heaviest first."""

    of: I64
    """int64 [n]: the bin of each item."""
    start: I64
    """int64 [m]: where bin b begins in `member`."""
    slots: I64
    """int64 [m]: entries that it owns there."""
    held: I64
    """int64 [m]: entries in use."""
    member: I64
    """int64: the items, bin after bin."""
    value: I64
    """int64: load of each entry of `member`."""
    load: I64
    """int64 [m]: sum of the loads in each bin."""
    used: I64
    """int64 [m]: memory in use in each bin."""
    ranked: I64
    """int64 [m]: the bins, lightest first."""
    position_of: I64
    """int64 [m]: where each bin is in `ranked`, its inverse."""


def improve(
    items: Items, seed: I64, num_bins: int, capacity: int, memory_cap: int, targets: I64, budget: int, beyond: bool
) -> tuple[I64, int]:
    """Lower the heaviest bin by moves, swaps and, where these end, kicks; or all heavy bins, one after the other.

    Args:
        items: what is placed.
        seed: int64 [n], the bin of each item to start from; within both caps.
        num_bins: number of bins.
        capacity: items that a bin may hold.
        memory_cap: memory that a bin may hold.
        targets: int64 [t], falling. For each, an exchange that leaves both bins at or under it is taken as soon as it
            is found, else the best one. The search ends at the last.
        budget: pairs of items that may be looked at; refilling the bins counts as n.
        beyond: where no exchange helps the heaviest bin, leave it and go on with the next heaviest, without kicks.

    Returns:
        The best assignment found, and the pairs that were looked at.
    """
    best, bins = seed.copy(), _bins(len(seed), num_bins)
    return best, _search(items, best, bins, capacity, memory_cap, targets, budget, beyond)


def _bins(num_items: int, num_bins: int) -> Bins:
    start, slots, held, load, used, ranked, position_of = np.empty((7, num_bins), np.int64)
    member, value = np.empty((2, num_items + SLACK * num_bins), np.int64)
    return Bins(np.empty(num_items, np.int64), start, slots, held, member, value, load, used, ranked, position_of)


@kernel
def _search(
    items: Items, best: I64, bins: Bins, capacity: int, memory_cap: int, targets: I64, budget: int, beyond: bool
) -> int:
    """The descents and kicks of `improve`, from the assignment `best`, which changes. Returns the pairs looked at."""
    _lay_out(items, best, bins, capacity)
    lightest, looked, number = -1, 0, 0
    while True:
        _fill(items, best, bins)
        looked += len(best)
        if number:
            _kick(items, bins, number, memory_cap)
        looked += _descend(items, bins, memory_cap, targets, budget - looked, beyond)
        heaviest = bins.load[bins.ranked[len(bins.ranked) - 1]]
        if number == 0 or heaviest < lightest:
            copy_to(best, bins.of)
            lightest = heaviest
        number += 1
        if beyond or lightest <= targets[-1] or looked >= budget:
            return looked


@inlined_part
def _lay_out(items: Items, seed: I64, bins: Bins, capacity: int) -> None:
    """Divide the entries among the bins, and rank these."""
    held, load = bins.held, bins.load
    held[:] = 0
    load[:] = 0
    for item in range(len(seed)):
        held[seed[item]] += 1
        load[seed[item]] += items.load[item]
    total = 0
    for b in range(len(held)):
        bins.start[b] = total
        bins.slots[b] = min(capacity, held[b] + SLACK)
        total += bins.slots[b]
    sort_by(load, bins.ranked)


@inlined_part
def _fill(items: Items, of: I64, bins: Bins) -> None:
    copy_to(bins.of, of)
    bins.held[:] = 0
    bins.load[:] = 0
    bins.used[:] = 0
    for item in items.order:
        b = of[item]
        entry = bins.start[b] + bins.held[b]
        bins.member[entry], bins.value[entry] = item, items.load[item]
        bins.held[b] += 1
        bins.load[b] += items.load[item]
        bins.used[b] += items.memory[item]
    ranked, position_of, load = bins.ranked, bins.position_of, bins.load
    for position in range(len(ranked)):  # by insertion: few bins differ from the last time
        b, before = ranked[position], position
        while before and (load[ranked[before - 1]], ranked[before - 1]) > (load[b], b):
            ranked[before] = ranked[before - 1]
            position_of[ranked[before]] = before
            before -= 1
        ranked[before], position_of[b] = b, before


@inlined_part
def _kick(items: Items, bins: Bins, number: int, memory_cap: int) -> None:
    """Swap an item of the heaviest bin, and one of another bin, with items of other bins.

    Which ones follows from the number of the kick, by a multiplicative hash (Knuth, The Art of Computer Programming 3,
    section 6.4): it scatters them, and is deterministic.
    """
    last = len(bins.ranked) - 1
    for which in range(2):
        spread = (2 * number + which) * 2654435761 % (1 << 32)
        left = bins.ranked[last] if which == 0 else bins.ranked[spread % (last + 1)]
        right = bins.ranked[(spread >> 8) % max(last, 1)]
        if left != right and bins.held[left] and bins.held[right]:
            give = bins.start[left] + (spread >> 16) % bins.held[left]
            take = bins.start[right] + (spread >> 20) % bins.held[right]
            if _fits(items, bins, left, right, give, take, memory_cap):
                _exchange(items, bins, left, right, give, take)


@inlined_part
def _descend(items: Items, bins: Bins, memory_cap: int, targets: I64, budget: int, beyond: bool) -> int:
    """Best exchanges of the heaviest bin until none helps. Returns the pairs that were looked at."""
    looked = 0
    for target in targets:
        top = len(bins.ranked) - 1
        while looked < budget and top and bins.load[bins.ranked[top]] > target:
            heavy = bins.ranked[top]
            light, give, take, pairs = _best_exchange(items, bins, top, memory_cap, target)
            looked += pairs
            if light != heavy:
                _exchange(items, bins, heavy, light, give, take)
            elif beyond:
                top -= 1
            else:
                break
    return looked


@inlined_part
def _best_exchange(items: Items, bins: Bins, at_rank: int, memory_cap: int, target: int) -> tuple[int, int, int, int]:
    """The exchange of the bin at a rank that leaves the heavier of its two bins lightest.

    Returns (light bin, or the heavy one where none helps; give, take, pairs looked at).
    `give` and `take` are entries of the two bins; take = start + held of the light one is the empty slot, a move.
    Lighter bins come first; a bin that could not beat the best exchange even if the two shared their load evenly ends
    the search. Both bins are sorted, so for each item of the heavy bin the closest partner is found by advancing one
    pointer.
    """
    heavy = bins.ranked[at_rank]
    top = bins.load[heavy]
    best, light, give, take, looked = top, heavy, bins.start[heavy], bins.start[heavy], 1
    for other in bins.ranked[:at_rank]:
        gap = top - bins.load[other]
        if bins.load[other] + (gap + 1) // 2 >= best:
            break
        first, last = bins.start[other], bins.start[other] + bins.held[other]
        # [first, ends): where to exchange with; entry `last` is the empty slot, if the bin has one
        ends = last + 1 if bins.held[other] < bins.slots[other] else last
        at = first
        for here in range(bins.start[heavy], bins.start[heavy] + bins.held[heavy]):
            wanted = bins.value[here] - gap // 2  # both bins end equal
            while at < last and bins.value[at] > wanted:
                at += 1
            for there in range(max(first, at - 1), min(ends, at + 1)):
                moved = bins.value[here] - (bins.value[there] if there < last else 0)
                heavier = max(top - moved, bins.load[other] + moved)
                if heavier < best and _fits(items, bins, heavy, other, here, there, memory_cap):
                    best, light, give, take = heavier, other, here, there
        looked += bins.held[heavy] + bins.held[other]
        if best <= target:
            break
    return light, give, take, looked


@part
def _fits(items: Items, bins: Bins, heavy: int, light: int, give: int, take: int, memory_cap: int) -> bool:
    """Whether an exchange keeps both bins within the memory cap."""
    moved = items.memory[bins.member[give]]
    if take < bins.start[light] + bins.held[light]:
        moved -= items.memory[bins.member[take]]
    return bool(bins.used[heavy] - moved <= memory_cap and bins.used[light] + moved <= memory_cap)


@part
def _exchange(items: Items, bins: Bins, heavy: int, light: int, give: int, take: int) -> None:
    """Carry out an exchange: `give` goes to the light bin, and what `take` points at, if anything, to the heavy one."""
    given = bins.member[give]
    if take < bins.start[light] + bins.held[light]:
        taken = bins.member[take]
        _book(items, bins, taken, light, heavy)
        _settle(bins, heavy, give, taken, items.load[taken])
    else:
        bins.held[heavy] -= 1
        for entry in range(give, bins.start[heavy] + bins.held[heavy]):
            bins.member[entry], bins.value[entry] = bins.member[entry + 1], bins.value[entry + 1]
        bins.held[light] += 1
    _book(items, bins, given, heavy, light)
    _settle(bins, light, take, given, items.load[given])
    for b in (heavy, light):
        _rank(bins, b)


@part
def _book(items: Items, bins: Bins, item: int, source: int, target: int) -> None:
    """Count an item in its new bin."""
    bins.of[item] = target
    bins.load[source] -= items.load[item]
    bins.load[target] += items.load[item]
    bins.used[source] -= items.memory[item]
    bins.used[target] += items.memory[item]


@part
def _settle(bins: Bins, b: int, entry: int, item: int, load: int) -> None:
    """Put an item where `entry` was and shift others so that bin b stays sorted."""
    member, value = bins.member, bins.value
    first, last = bins.start[b], bins.start[b] + bins.held[b] - 1
    while entry > first and value[entry - 1] < load:
        member[entry], value[entry] = member[entry - 1], value[entry - 1]
        entry -= 1
    while entry < last and value[entry + 1] > load:
        member[entry], value[entry] = member[entry + 1], value[entry + 1]
        entry += 1
    member[entry], value[entry] = item, load


@inlined_part
def _rank(bins: Bins, b: int) -> None:
    """Move bin b to where its load belongs."""
    ranked, position_of, load = bins.ranked, bins.position_of, bins.load
    position, last = position_of[b], len(ranked) - 1
    while position > 0 and load[ranked[position - 1]] > load[b]:
        ranked[position] = ranked[position - 1]
        position_of[ranked[position]] = position
        position -= 1
    while position < last and load[ranked[position + 1]] < load[b]:
        ranked[position] = ranked[position + 1]
        position_of[ranked[position]] = position
        position += 1
    ranked[position], position_of[b] = b, position
