"""Kernels that place items one by one, and differencing."""

import numpy as np

from dataserver.planning.kernels import kernel, part
from dataserver.planning.kernels.heap import sift_down, sift_up, sort_by
from dataserver.planning.samples import I64


def longest_first(loads: I64, order: I64, starts: I64, num_bins: int, capacity: int) -> I64:
    """The bin of each item: in `order` to the lightest bin with fewer than `capacity` items, the lower on ties.

    `order` begins anew, with empty bins, at each but the last of `starts`.
    """
    bins, load, count = np.empty_like(loads), np.empty(num_bins, np.int64), np.empty(num_bins, np.int64)
    _longest_first(loads, order, starts, capacity, bins, np.empty(num_bins, np.int64), load, count)
    return bins


@kernel
def _longest_first(
    loads: I64, order: I64, starts: I64, capacity: int, bins: I64, heap: I64, load: I64, count: I64
) -> None:
    # heap[:size]: the bins below `capacity`, least (load, bin) on top; only the load of the one on top ever changes
    for own in range(len(starts) - 1):
        size = len(heap)
        for b in range(size):
            heap[b], load[b], count[b] = b, 0, 0
        for place in range(starts[own], starts[own + 1]):
            item, chosen = order[place], heap[0]
            bins[item] = chosen
            load[chosen] += loads[item]
            count[chosen] += 1
            if count[chosen] == capacity:
                size -= 1
                heap[0] = heap[size]
            sift_down(heap, size, load)


def longest_first_within(
    loads: I64, memory: I64, order: I64, num_bins: int, capacity: int, memory_cap: int
) -> tuple[I64, int]:
    """`longest_first` to bins that have room for the item's memory too.

    Bins without such room wait in `aside`, a heap by memory in use, for smaller items.

    Returns:
        The bin of each item, and the first item for which there was no bin, or -1.
    """
    bins, heap, aside = np.full_like(loads, -1), np.arange(num_bins), np.empty(num_bins, np.int64)
    load, count, used = np.zeros((3, num_bins), np.int64)
    return bins, _longest_first_within(loads, memory, order, capacity, memory_cap, bins, heap, aside, load, count, used)


@kernel
def _longest_first_within(
    loads: I64,
    memory: I64,
    order: I64,
    capacity: int,
    memory_cap: int,
    bins: I64,
    heap: I64,
    aside: I64,
    load: I64,
    count: I64,
    used: I64,
) -> int:
    size, num_aside = len(heap), 0
    for item in order:
        used_at_most = memory_cap - memory[item]  # of a bin with room for it
        while num_aside and used[aside[0]] <= used_at_most:  # what was too full for larger items
            heap[size] = aside[0]
            size += 1
            sift_up(heap, size, load)
            num_aside -= 1
            aside[0] = aside[num_aside]
            sift_down(aside, num_aside, used)
        while size and used[heap[0]] > used_at_most:
            aside[num_aside] = heap[0]
            num_aside += 1
            sift_up(aside, num_aside, used)
            size -= 1
            heap[0] = heap[size]
            sift_down(heap, size, load)
        if size == 0:
            return int(item)
        chosen = heap[0]
        bins[item] = chosen
        load[chosen] += loads[item]
        count[chosen] += 1
        used[chosen] += memory[item]
        if count[chosen] == capacity:
            size -= 1
            heap[0] = heap[size]
        sift_down(heap, size, load)
    return -1


def differencing(loads: I64, order: I64, num_bins: int) -> I64:
    """Balanced largest differencing: the bin of each item, ceil(n / num_bins) items at most in each.

    Partial solution t begins as the items [t m, (t + 1) m) of `order`, one in each of its m bins. Its bins stand in
    load[t], heaviest first, each with a chain of items from head to tail (-1: empty), linked by `following`.
    """
    parts = -(-len(loads) // num_bins)
    chains = np.full((2, parts, num_bins), -1, np.int64)
    bins, following = np.full((2, len(loads)), -1, np.int64)
    heap, lowest_first = np.empty((2, parts), np.int64)
    load, scratch = np.zeros((parts, num_bins), np.int64), np.empty((4, num_bins), np.int64)
    _difference(loads, order, bins, load, chains[0], chains[1], following, heap, lowest_first, scratch)
    return bins


@kernel
def _difference(
    loads: I64,
    order: I64,
    bins: I64,
    load: I64,
    head: I64,
    tail: I64,
    following: I64,
    heap: I64,
    lowest_first: I64,
    scratch: I64,
) -> None:
    parts, num_bins = load.shape
    for position, item in enumerate(order):
        part, b = divmod(position, num_bins)
        load[part, b], head[part, b], tail[part, b] = loads[item], item, item
    for part in range(parts):
        lowest_first[part] = load[part, num_bins - 1] - load[part, 0]  # the widest spread has the least key
    sort_by(lowest_first, heap)
    size = parts
    while size > 1:
        wide = heap[0]
        size -= 1
        heap[0] = heap[size]
        sift_down(heap, size, lowest_first)
        into = heap[0]  # the second widest
        _merge(load, head, tail, following, wide, into, scratch)
        lowest_first[into] = load[into, num_bins - 1] - load[into, 0]
        sift_down(heap, size, lowest_first)
    for b in range(num_bins if parts else 0):
        item = head[heap[0], b]
        while item >= 0:
            bins[item] = b
            item = following[item]


@part
def _merge(load: I64, head: I64, tail: I64, following: I64, wide: int, into: int, scratch: I64) -> None:
    """Join the heaviest bin of one partial solution with the lightest of the other, and so on."""
    num_bins = load.shape[1]
    for b in range(num_bins):
        opposite = num_bins - 1 - b
        load[into, b] += load[wide, opposite]
        if head[wide, opposite] < 0:
            continue
        if head[into, b] < 0:
            head[into, b] = head[wide, opposite]
        else:
            following[tail[into, b]] = head[wide, opposite]
        tail[into, b] = tail[wide, opposite]
    for b in range(num_bins):
        scratch[0, b], scratch[1, b], scratch[2, b] = -load[into, b], head[into, b], tail[into, b]
    by_load = scratch[3]
    sort_by(scratch[0], by_load)
    for b in range(num_bins):
        old = by_load[b]
        load[into, b], head[into, b], tail[into, b] = -scratch[0, old], scratch[1, old], scratch[2, old]
