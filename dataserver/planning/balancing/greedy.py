"""Balancers that place every item once, and the baseline."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing.interface import (
    BinBudget,
    BinBudgetError,
    bin_loads,
    check,
    check_loads,
    plain,
    search_budget,
)


def longest_first(loads: I64, num_bins: int, capacity: int | None = None, budget: BinBudget | None = None) -> I64:
    """Longest processing time first with caps on the items and the memory of a bin (DistTrain, Algorithm 1).

    Items, heaviest first, go to the lightest bin that has room. Without caps the heaviest bin is at most
    4/3 - 1/(3 num_bins) of the optimum (Graham 1969). Ties go to the lower item and the lower bin. O(n log n). Where
    an item finds no bin with enough memory left, all are placed as if there were no memory, and repaired (`_repaired`).

    Arguments, result and errors are those of `Balancer`.
    """
    from dataserver.planning.kernels import greedy

    limit = check(loads, num_bins, capacity, budget)
    loads = plain(loads)
    order = np.argsort(-loads, kind="stable")
    if budget is not None:
        bins, left_over = greedy.longest_first_within(loads, plain(budget.need), order, num_bins, limit, budget.cap)
        if left_over < 0:
            return bins
    bins = greedy.longest_first(loads, order, np.array([0, len(loads)]), num_bins, limit)
    return bins if budget is None else _repaired(bins, num_bins, limit, budget)


def longest_first_of_each(loads: I64, owner: I64, num_owners: int, num_bins: int, capacity: int) -> I64:
    """`longest_first` of the items of each owner, into bins of its own.

    Args:
        loads: int64 [n], as in `Balancer`.
        owner: int64 [n], of each item.
        num_owners: number of owners.
        num_bins: of each owner.
        capacity: items that a bin may hold.

    Returns:
        int64 [n]: the bin of each item, among its owner's.

    Raises:
        ValueError: an owner has more items than its bins may hold, or numbers are out of their range.
    """
    from dataserver.planning.kernels import greedy

    counts = np.bincount(owner, minlength=num_owners)
    check_loads(loads, int(counts.max(initial=0)), num_bins, capacity)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return greedy.longest_first(plain(loads), np.lexsort((-loads, owner)), starts, num_bins, capacity)


def _repaired(bins: I64, num_bins: int, capacity: int, budget: BinBudget) -> I64:
    """The bins, changed by moves and swaps until all are within the memory.

    The search of `searched`, with the needs as loads, until no bin exceeds the cap; it looks at `search_budget(n)`
    pairs at most. If that fails, once more from the needs placed longest first. Bins within the cap stay as they
    are.

    Raises:
        BinBudgetError: neither led to bins within the memory. There may be some: this is bin packing.
    """
    from dataserver.planning.kernels import greedy, search

    need = plain(budget.need)
    order = np.argsort(-need, kind="stable")
    items, cap = search.Items(need, np.zeros(len(need), np.int64), order), np.array([budget.cap], np.int64)
    least = budget.cap
    for start in (bins, greedy.longest_first(need, order, np.array([0, len(need)]), num_bins, capacity)):
        found, _ = search.improve(items, start, num_bins, capacity, 0, cap, search_budget(len(need)), False)
        least = int(bin_loads(need, found, num_bins).max())
        if least <= budget.cap:
            return found
    raise BinBudgetError(
        f"found no way to place {len(need)} items within the memory of {num_bins} bins of {budget.cap}: one of them "
        f"would need {least}; raise the number of bins or their memory"
    )


def in_runs(num_items: int, num_bins: int) -> I64:
    """The baseline: items in their order, dealt out in runs whose lengths differ by at most one. int64 [num_items]."""
    return np.arange(num_items, dtype=np.int64) * num_bins // max(num_items, 1)
