"""What all balancers share: their signature, their checks, and how far they could possibly get."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dataserver.planning import I64

MAX_TOTAL = 2**61
"""Largest sum of loads, so that no sum of two overflows int64."""


class BinBudgetError(ValueError):
    """Items that bins have too little memory for, or that no way was found to place within it."""


@dataclass(frozen=True, slots=True)
class BinBudget:
    """A second resource, capped for each bin, such as activation bytes or tokens."""

    need: I64
    """int64 [n]: of each item, non-negative."""
    cap: int
    """Most memory that one bin holds."""


class Balancer(Protocol):
    """Spreads items over bins so that the heaviest bin is light. Pure: the same arguments give the same bins."""

    def __call__(self, loads: I64, num_bins: int, capacity: int | None = None, budget: BinBudget | None = None) -> I64:
        """Place every item.

        Args:
            loads: int64 [n], non-negative, sum at most MAX_TOTAL.
            num_bins: number of bins.
            capacity: items that a bin may hold; n <= num_bins * capacity is required. With equality all bins hold
                equal counts.
            budget: a second resource.

        Returns:
            int64 [n]: the bin of each item.

        Raises:
            BinBudgetError: the memory does not hold the items, or no way to fit them was found.
            ValueError: more items than the bins may hold, or numbers out of their range.
        """
        ...


def check(loads: I64, num_bins: int, capacity: int | None = None, budget: BinBudget | None = None) -> int:
    """Refuse what no balancer can place; returns the capacity, or n without one.

    Raises:
        BinBudgetError: the memory cannot hold the items.
        ValueError: a load or need is negative or too large, or there are more items than the bins may hold.
    """
    count = len(loads)
    if num_bins < 1:
        raise ValueError(f"{num_bins} bins; at least 1 is required")
    check_loads(loads, count, num_bins, count if capacity is None else capacity)
    if budget is not None:
        _check_budget(budget, count, num_bins)
    return count if capacity is None else capacity


def check_loads(loads: I64, together: int, num_bins: int, capacity: int) -> None:
    """Refuse, with ValueError, loads that are too large for so many together, or too many for the bins."""
    if together and (loads.min() < 0 or int(loads.max()) > MAX_TOTAL // together):
        raise ValueError(
            f"loads from {int(loads.min())} to {int(loads.max())}; {together} loads must lie in [0, 2^61 / "
            f"{together}]: use a coarser unit"
        )
    if together > num_bins * capacity:
        raise ValueError(f"{together} items do not fit {num_bins} bins of {capacity}; raise the number of bins")


def _check_budget(budget: BinBudget, count: int, num_bins: int) -> None:
    if len(budget.need) != count:
        raise ValueError(f"memory of {len(budget.need)} items for loads of {count}; one for each is required")
    if budget.cap < 0:
        raise ValueError(f"bins have {budget.cap} of memory; at least 0 is required")
    if not count:
        return
    item = int(budget.need.argmax())
    if budget.need.min() < 0 or budget.need[item] > budget.cap:
        kind = ValueError if budget.need.min() < 0 else BinBudgetError
        raise kind(
            f"needs of memory from {int(budget.need.min())} to {int(budget.need[item])} (item {item}); each must lie "
            f"in [0, {budget.cap}], the memory of a bin"
        )
    total = sum(budget.need.tolist())
    if total > num_bins * budget.cap:
        raise BinBudgetError(
            f"items need {total} of memory, {num_bins} bins of {budget.cap} have {num_bins * budget.cap}; raise the "
            "number of bins"
        )


def plain(values: I64) -> I64:
    """A writable contiguous copy: kernels are compiled for nothing else."""
    return np.array(values, np.int64)


def search_budget(num_items: int) -> int:
    """Pairs of items that a search looks at by default: a constant and so many for each item."""
    return 2**14 + 64 * num_items


def bin_loads(loads: I64, bins: I64, num_bins: int) -> I64:
    """The load of each bin. int64 [num_bins]."""
    total = np.zeros(num_bins, np.int64)
    np.add.at(total, bins, loads)
    return total


def bin_totals(values: I64, bins: I64, num_bins: int, *, padded: bool) -> I64:
    """Sum of the values of each bin; padded: their count x the largest. int64 [num_bins]."""
    if not padded:
        return bin_loads(values, bins, num_bins)
    largest = np.zeros(num_bins, np.int64)
    np.maximum.at(largest, bins, values)
    total: I64 = largest * np.bincount(bins, minlength=num_bins)
    return total


def lower_bound(loads: I64, num_bins: int, capacity: int | None = None) -> int:
    """A load that the heaviest bin of no assignment falls below.

    j bins hold at least n - (m - j) x capacity items between them, since the other bins hold `capacity` at most. So the
    heaviest bin is at least

    - for every k, the k + 1 lightest of the k m + 1 heaviest items (some bin holds so many of these) with the lightest
      items that must fill that bin;
    - for every j, the mean of the bins of the j heaviest items with the lightest items that must fill them, or, if two
      of these items share a bin, the two lightest of them and the lightest items that must fill it. With j = m this is
      the mean, with j = 1 the largest item + the (count - 1) smallest.
    """
    limit, count = check(loads, num_bins, capacity), len(loads)
    if not count:
        return 0
    ordered = np.sort(loads)[::-1]
    before = np.concatenate(([0], np.cumsum(ordered)))

    def lightest(number: I64) -> I64:
        found: I64 = before[-1] - before[count - np.maximum(number, 0)]
        return found

    must_hold = count - (num_bins - 1) * limit
    k = np.arange((count - 1) // num_bins + 1)
    crowded = before[k * num_bins + 1] - before[k * num_bins - k] + lightest(must_hold - k - 1)
    j = np.arange(1, min(num_bins, count) + 1)
    apart = -(-(before[j] + lightest(count - (num_bins - j) * limit - j)) // j)
    apart[1:] = np.minimum(apart[1:], ordered[j[1:] - 2] + ordered[j[1:] - 1] + lightest(np.array([must_hold - 2])))
    return max(-(-int(before[-1]) // num_bins), int(crowded.max()), int(apart.max()))
