"""Bounded local search on top of a balancer."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing.greedy import longest_first
from dataserver.planning.balancing.interface import (
    Balancer,
    BinBudget,
    check,
    lower_bound,
    plain,
    search_budget,
)

CLOSE = 16
"""The search ends at 2^-16 above the lower bound: 0.0015 %, far below what any cost model knows."""


def searched(
    loads: I64,
    num_bins: int,
    capacity: int | None = None,
    budget: BinBudget | None = None,
    *,
    seed: Balancer = longest_first,
    looks: int | None = None,
) -> I64:
    """The bins of a balancer, improved by moves and swaps between the heaviest bin and lighter ones.

    Every exchange is the best for the heaviest bin (or brings both bins close to the lower bound at once). Where none
    helps, two swaps that follow from a running number disturb the best assignment, and the search goes on from there
    (iterated local search: Lourenco, Martin and Stuetzle 2003). Never worse than the seed. Ends at 2^-16 above
    `lower_bound`, or when the budget is spent; no clock takes part.

    Arguments, result and errors are those of `Balancer`; `seed` is the balancer to begin with, `looks` the pairs of
    items to look at, `search_budget(n)` unless given: about a nanosecond each.
    """
    from dataserver.planning.kernels import search

    limit = check(loads, num_bins, capacity, budget)
    bins = seed(loads, num_bins, capacity, budget)
    bound = lower_bound(loads, num_bins, capacity)
    items = search.Items(
        load=plain(loads),
        memory=np.zeros(len(loads), np.int64) if budget is None else plain(budget.need),
        order=np.argsort(-loads, kind="stable"),
    )
    targets = np.array([bound + (bound >> 12), bound + (bound >> CLOSE)], np.int64)
    spend = search_budget(len(loads)) if looks is None else looks
    best, _ = search.improve(
        items, plain(bins), num_bins, limit, 0 if budget is None else budget.cap, targets, spend, False
    )
    return best
