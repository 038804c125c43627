"""Which rank works on which of the items that all ranks have sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import BALANCERS, bin_loads, fewest_bytes, traffic_between

PADDED = "padded"
"""The balancer of items that are padded to the longest one beside them; the others add loads up."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A rank for each item. Items are numbered rank by rank as they were sampled; a rank works on its own in order."""

    home: I64
    """int64 [n]: the rank that sampled each item."""
    rank: I64
    """int64 [n]: the rank that works on it."""
    num_ranks: int

    @classmethod
    def as_sampled(cls, counts: Sequence[int]) -> "Arrangement":
        """Every item where it was sampled, given how many each rank sampled."""
        home = np.repeat(np.arange(len(counts)), counts)
        return cls(home, home, len(counts))

    def of(self, rank: int) -> I64:
        """The items that a rank works on, ascending. int64 [k]."""
        return np.flatnonzero(self.rank == rank)

    def loads(self, loads: Sequence[Sequence[int]]) -> I64:
        """The sum of each rank, int64 [num_ranks], of what each rank sampled."""
        return bin_loads(joined(loads), self.rank, self.num_ranks)

    def imbalance(self, loads: Sequence[Sequence[int]]) -> float:
        """Load of the busiest rank over the mean; 1.0 where there is none."""
        found = self.loads(loads)
        return float(found.max() / found.mean()) if found.any() else 1.0


def arrange(
    loads: Sequence[Sequence[int]],
    *,
    policy: str = "search",
    at_most: int | None = None,
    ranks_per_node: int | None = None,
    num_bytes: Sequence[Sequence[int]] | None = None,
) -> Arrangement:
    """Balance the items of a step over the ranks that sampled them.

    Deterministic: ranks that know the same loads get the same arrangement, so nothing but loads has to be exchanged.

    Args:
        loads: for each rank those of its items, non-negative integers: what grows with an item's time, such as its
            length, or `a * length + b * length**2`.
        policy: `lpt` (longest first, 4/3 of the optimum), `search` (the same, then bounded moves and swaps), or
            `padded`, for items that are padded to the longest one of their rank.
        at_most: items that a rank may get; with the mean number all get equally many.
        ranks_per_node: consecutive ranks of a node. Whose batch is whose is free; with this, batches go where the
            fewest bytes leave their node (OrchMLLM, "Node-wise All-to-All").
        num_bytes: of each item, where they are not in proportion to the loads.

    Raises:
        ValueError: an unknown policy, loads out of range or no integers, more items than `at_most` lets ranks hold, or
            sizes and loads of different numbers of items.
    """
    if not len(loads) or (ranks_per_node is not None and ranks_per_node < 1):
        raise ValueError(f"{len(loads)} ranks, {ranks_per_node} of them on a node; at least 1 each is required")
    if policy not in BALANCERS:
        raise ValueError(f"there is no policy {policy!r}; choose one of {', '.join(BALANCERS)}")
    ranks, flat = len(loads), joined(loads)
    home = Arrangement.as_sampled([len(found) for found in loads])
    batch = BALANCERS[policy](flat, ranks, at_most)
    if policy != PADDED and bin_loads(flat, batch, ranks).max() >= home.loads(loads).max() and _fits(home, at_most):
        return home
    rank = np.arange(ranks)
    if ranks_per_node is not None:
        size = flat if num_bytes is None else joined(num_bytes)
        if len(size) != len(flat):
            raise ValueError(f"num_bytes has {len(size)} items and loads {len(flat)}; give both for the same items")
        node = np.arange(ranks) // ranks_per_node
        rank = fewest_bytes(traffic_between(home.home, batch, size, ranks, ranks), node, node)
    return Arrangement(home.home, rank[batch], ranks)


def joined(several: Sequence[Sequence[int]]) -> I64:
    """What all ranks have, one after the other, int64 [n]; errors as in `integers`."""
    return np.concatenate(
        [np.zeros(0, np.int64), *(integers(f"rank {rank}", found) for rank, found in enumerate(several))]
    )


def integers(owner: str, found: Sequence[int]) -> I64:
    """The same as int64 [k]; ValueError unless it is one integer for each of the owner's items."""
    array = np.asarray(found)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{owner} has numbers of shape {list(array.shape)} and type {array.dtype}; one integer for each of its "
            "items is required"
        )
    return array.astype(np.int64)


def _fits(arrangement: Arrangement, at_most: int | None) -> bool:
    return at_most is None or int(np.bincount(arrangement.rank).max(initial=0)) <= at_most
