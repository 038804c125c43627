"""Balancing batches that are padded to their longest item."""

from itertools import accumulate, pairwise

import numpy as np

from dataserver.planning.balancing.interface import Memory, check
from dataserver.planning.samples import I64


def padded(loads: I64, num_bins: int, capacity: int | None = None, memory: Memory | None = None) -> I64:
    """Least possible maximum, over the batches, of count x largest load (OrchMLLM, post-balancing with padding).

    In an optimum every batch is a run of the sorted items. For a bound B, runs are cut from the heaviest item on, each
    as long as its first item allows; the least B for which `num_bins` runs suffice is found by bisection. Bin 0 holds
    the heaviest run; bins may stay empty. With load = cost of an item of that length (`costs.forward_ns`), padded
    batches with a quadratic term are the same problem, since a batch costs count x the cost of its longest item.
    O(n log n + num_bins log total).

    Arguments and result are those of `Balancer`.

    Raises:
        ValueError: the items do not fit, or a memory is given.
    """
    if memory is not None:
        raise ValueError("padded batches keep no memory cap; cap the count instead")
    limit = check(loads, num_bins, capacity)
    order = np.argsort(-loads, kind="stable")
    ordered = loads[order].tolist()
    low, high = (ordered[0], ordered[0] * limit) if ordered else (0, 0)
    while low < high:
        middle = (low + high) // 2
        if sum(_runs(ordered, middle, num_bins, limit)) >= len(ordered):
            high = middle
        else:
            low = middle + 1
    bins = np.empty(len(loads), np.int64)
    starts = [0, *accumulate(_runs(ordered, high, num_bins, limit))]
    for b, (first, last) in enumerate(pairwise(starts)):
        bins[order[first:last]] = b
    return bins


def _runs(ordered: list[int], bound: int, num_bins: int, capacity: int) -> list[int]:
    """Lengths of the runs whose count x first load stays within the bound, at most `num_bins` of them."""
    runs: list[int] = []
    first = 0
    while first < len(ordered) and len(runs) < num_bins:
        length = min(capacity, bound // ordered[first] if ordered[first] else capacity, len(ordered) - first)
        runs.append(length)
        first += length
    return runs
