"""Kernels that place items one by one, and differencing."""

import numpy as np

from dataserver.planning.kernels import kernel, part
from dataserver.planning.kernels.heap import sift_down, sift_up, sort_by
from dataserver.planning.samples import I64


@kernel
def longest_first(loads: I64, order: I64, num_bins: int, capacity: int) -> I64:
    """The bin of each item: in `order` to the lightest bin with fewer than `capacity` items, the lower on ties."""
    bins = np.empty(len(loads), np.int64)
    # heap[:size]: the bins below `capacity`, least (load, bin) on top; only the load of the one on top ever changes
    heap, load, count = np.arange(num_bins), np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    size = num_bins
    for item in order:
        chosen = heap[0]
        bins[item] = chosen
        load[chosen] += loads[item]
        count[chosen] += 1
        if count[chosen] == capacity:
            size -= 1
            heap[0] = heap[size]
        sift_down(heap, size, load)
    return bins


@kernel
def longest_first_within(
    loads: I64, memory: I64, order: I64, num_bins: int, capacity: int, memory_cap: int
) -> tuple[I64, int]:
    """`longest_first` to bins that have room for the item's memory too.

    Bins without such room wait in `aside`, a heap by memory in use, for smaller items.

    Returns:
        The bin of each item, and the first item for which there was no bin, or -1.
    """
    bins = np.empty(len(loads), np.int64)
    bins[:] = -1
    heap, aside = np.arange(num_bins), np.empty(num_bins, np.int64)
    load, count, used = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    size, num_aside = num_bins, 0
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
            return bins, item
        chosen = heap[0]
        bins[item] = chosen
        load[chosen] += loads[item]
        count[chosen] += 1
        used[chosen] += memory[item]
        if count[chosen] == capacity:
            size -= 1
            heap[0] = heap[size]
        sift_down(heap, size, load)
    return bins, -1


@kernel
def differencing(loads: I64, order: I64, num_bins: int) -> I64:
    """Balanced largest differencing: the bin of each item, ceil(n / num_bins) items at most in each.

    Partial solution t begins as the items [t m, (t + 1) m) of `order`, one in each of its m bins. Its bins stand in
    load[t], heaviest first, each with a chain of items from head to tail (-1: empty), linked by `following`.
    """
    parts = -(-len(loads) // num_bins)
    load = np.zeros((parts, num_bins), np.int64)
    head, tail = np.empty((parts, num_bins), np.int64), np.empty((parts, num_bins), np.int64)
    following, heap = np.empty(len(loads), np.int64), np.empty(parts, np.int64)
    head[:], tail[:], following[:] = -1, -1, -1
    for position, item in enumerate(order):
        part, b = divmod(position, num_bins)
        load[part, b], head[part, b], tail[part, b] = loads[item], item, item
    lowest_first = np.empty(parts, np.int64)  # the widest spread has the least key
    for part in range(parts):
        lowest_first[part] = load[part, num_bins - 1] - load[part, 0]
    sort_by(lowest_first, heap)
    scratch, by_load = np.empty((3, num_bins), np.int64), np.empty(num_bins, np.int64)
    size = parts
    while size > 1:
        wide = heap[0]
        size -= 1
        heap[0] = heap[size]
        sift_down(heap, size, lowest_first)
        into = heap[0]  # the second widest
        _merge(load, head, tail, following, wide, into, scratch, by_load)
        lowest_first[into] = load[into, num_bins - 1] - load[into, 0]
        sift_down(heap, size, lowest_first)
    bins = np.empty(len(loads), np.int64)
    for b in range(num_bins if parts else 0):
        item = head[heap[0], b]
        while item >= 0:
            bins[item] = b
            item = following[item]
    return bins


@part
def _merge(load: I64, head: I64, tail: I64, following: I64, wide: int, into: int, scratch: I64, by_load: I64) -> None:
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
    sort_by(scratch[0], by_load)
    for b in range(num_bins):
        old = by_load[b]
        load[into, b], head[into, b], tail[into, b] = -scratch[0, old], scratch[1, old], scratch[2, old]
