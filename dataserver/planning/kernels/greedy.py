"""Kernels that place items one by one."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.kernels.compiler import kernel
from dataserver.planning.kernels.heap import sift_down, sift_up


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

    Bins without such budget wait in `aside`, a heap by memory in use, for smaller items.

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
