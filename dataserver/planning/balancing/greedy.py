"""Spreading items over bins so that the heaviest bin is light."""

import heapq

import numpy as np

from dataserver.planning.samples import I64


def longest_first(loads: I64, num_bins: int, capacity: int | None = None) -> I64:
    """Longest processing time first with a cap on the items of a bin (DistTrain, Algorithm 1).

    Items, heaviest first, go to the lightest bin that holds fewer than `capacity` items. Without a cap the heaviest bin
    is at most 4/3 - 1/(3 num_bins) of the optimum (Graham 1969). Ties go to the lower item and the lower bin.
    O(n log n).

    Args:
        loads: int64 [n], non-negative.
        num_bins: number of bins.
        capacity: items that a bin may hold; n <= num_bins * capacity is required.

    Returns:
        int64 [n]: the bin of each item.

    Raises:
        ValueError: the items cannot fit.
    """
    if capacity is not None and len(loads) > num_bins * capacity:
        raise ValueError(f"{len(loads)} items do not fit {num_bins} bins of {capacity}; raise the number of bins")
    bins = [(0, b) for b in range(num_bins)]
    counts = [0] * num_bins
    placed = np.empty(len(loads), np.int64)
    for item in np.argsort(-loads, kind="stable"):
        load, chosen = heapq.heappop(bins)
        placed[item] = chosen
        counts[chosen] += 1
        if counts[chosen] != capacity:
            heapq.heappush(bins, (load + int(loads[item]), chosen))
    return placed


def in_runs(num_items: int, num_bins: int) -> I64:
    """The baseline: items in their order, dealt out in runs whose lengths differ by at most one. int64 [num_items]."""
    return np.arange(num_items, dtype=np.int64) * num_bins // max(num_items, 1)
