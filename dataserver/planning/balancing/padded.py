"""Balancing batches that are padded to their longest item."""

from itertools import accumulate, pairwise

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing.interface import BinBudget, BinBudgetError, check


def padded(loads: I64, num_bins: int, capacity: int | None = None, budget: BinBudget | None = None) -> I64:
    """Least possible maximum, over the batches, of count x largest load (OrchMLLM, post-balancing with padding).

    A batch needs count x largest need of memory. Loads and needs come from the same sizes: of two items, the one with
    more load must not have less need. Then in an optimum every batch is a run of the sorted items, whatever the caps.
    For a bound B, runs are cut from the heaviest item on, each as long as its first item allows: B / load, memory /
    need, and the capacity. The least B for which `num_bins` runs suffice is found by bisection. Bin 0 holds the
    heaviest run; bins may stay empty. With load = cost of an item of that length (`costs.forward_ns`), padded batches
    with a quadratic term are the same problem, since a batch costs count x the cost of its longest item.
    O(n log n + num_bins log total).

    Arguments and result are those of `Balancer`.

    Raises:
        BinBudgetError: no batches fit the memory.
        ValueError: no batches fit the capacity, or an item with more load than another has less need.
    """
    limit = check(loads, num_bins, capacity, budget)
    need = np.zeros(len(loads), np.int64) if budget is None else budget.need
    order = np.lexsort((-need, -loads))
    _check_same_order(loads, need, order)
    ordered = loads[order].tolist()
    longest = [limit if budget is None or not n else min(limit, budget.cap // n) for n in need[order].tolist()]
    low, high = (ordered[0], ordered[0] * limit) if ordered else (0, 0)
    if budget is not None and sum(_runs(ordered, high, num_bins, longest)) < len(ordered):
        raise BinBudgetError(
            f"{len(loads)} padded items need {_least_need(need, num_bins, capacity)} of memory in one of {num_bins} "
            f"bins however they are arranged, but a bin has {budget.cap}; raise the number of bins or their memory"
        )
    while low < high:
        middle = (low + high) // 2
        if sum(_runs(ordered, middle, num_bins, longest)) >= len(ordered):
            high = middle
        else:
            low = middle + 1
    bins = np.empty(len(loads), np.int64)
    starts = [0, *accumulate(_runs(ordered, high, num_bins, longest))]
    for b, (first, last) in enumerate(pairwise(starts)):
        bins[order[first:last]] = b
    return bins


def _check_same_order(loads: I64, need: I64, order: I64) -> None:
    """Refuse needs that rise where loads fall."""
    rises = np.flatnonzero(np.diff(need[order]) > 0)
    if len(rises):
        heavy, light = order[rises[0]], order[rises[0] + 1]
        raise ValueError(
            f"item {heavy} has load {loads[heavy]} and needs {need[heavy]} of memory, item {light} has load "
            f"{loads[light]} and needs {need[light]}: of padded items the one with more load must not need less; take "
            "both from the items' sizes"
        )


def _least_need(need: I64, num_bins: int, capacity: int | None) -> int:
    """The least memory of a bin with which batches can fit the capacity."""
    bins = padded(need, num_bins, capacity)
    return max(int((bins == b).sum() * need[bins == b].max(initial=0)) for b in range(num_bins))


def _runs(ordered: list[int], bound: int, num_bins: int, longest: list[int]) -> list[int]:
    """Lengths of the runs whose count x first load stays within the bound, at most `num_bins` of them.

    `longest[i]` is what else a run that begins with item i may hold.
    """
    runs: list[int] = []
    first = 0
    while first < len(ordered) and len(runs) < num_bins:
        length = min(longest[first], len(ordered) - first)
        runs.append(min(length, bound // ordered[first]) if ordered[first] else length)
        first += runs[-1]
    return runs
