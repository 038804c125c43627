"""Finds in the plan's routings which rows of a microbatch go to which rank.

Both ends of an edge know the routing of every wave from their views, so each rank sends each other rank at most one
message per wave and direction, and ranks that share no rows exchange nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dataserver.planning import I64
from dataserver.planning.plan.plan import Routing


class RoutingError(ValueError):
    """Routing entries that do not fit the rows of a view."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """One side of a routing: which blocks of this rank's rows each rank of the other module has.

    All arrays are int64 [r]: one entry for each item.
    """

    rank: I64
    """Data-parallel rank within the other module."""
    start: I64
    """First row on this side."""
    rows: I64
    order: I64
    """Sort key that both sides share: the first row on the sending side of the forward pass."""

    @classmethod
    def leaving(cls, routing: Routing) -> Self:
        """What this rank of the source module sends in the forward pass."""
        return cls(routing.target_rank, routing.source_start, routing.rows, routing.source_start)

    @classmethod
    def arriving(cls, routing: Routing) -> Self:
        """What this rank of the target module receives in the forward pass."""
        return cls(routing.source_rank, routing.target_start, routing.rows, routing.source_start)

    def check_ranks(self, num_ranks: int, what: str) -> None:
        """Raise RoutingError if the blocks name ranks that do not exist."""
        if len(self.rank) and not 0 <= int(self.rank.min()) <= int(self.rank.max()) < num_ranks:
            raise RoutingError(
                f"the routing of {what} names rank {int(self.rank.max())} of a module with {num_ranks} ranks; all "
                "ranks must be started with the job that the servers plan"
            )

    def by_rank(self) -> list[tuple[int, I64]]:
        """The entries of each rank, ascending, in the order that both ends share."""
        order = np.lexsort((self.order, self.rank))
        ranks, firsts = np.unique(self.rank[order], return_index=True)
        return list(zip(ranks.tolist(), np.split(order, firsts[1:]), strict=False))

    def row_index(self, entries: I64) -> Tensor:
        """The rows of the given entries one after the other, int64."""
        lengths = self.rows[entries]
        first_of_entry = np.cumsum(lengths) - lengths
        offsets = self.start[entries] - first_of_entry
        return torch.from_numpy(np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(offsets, lengths))


def covering(several: Sequence[RowBlocks], num_rows: int, what: str) -> I64:
    """First row of each block of all routings together, ascending, and the end. int64 [r + 1].

    Raises:
        RoutingError: together they do not cover `num_rows` rows exactly once.
    """
    start = np.concatenate([np.zeros(0, np.int64), *(blocks.start for blocks in several)])
    rows = np.concatenate([np.zeros(0, np.int64), *(blocks.rows for blocks in several)])
    by_start = np.argsort(start, kind="stable")
    ends = np.cumsum(rows[by_start])
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    if int(offsets[-1]) != num_rows or not np.array_equal(offsets[:-1], start[by_start]) or (rows < 1).any():
        raise RoutingError(
            f"the routing covers {int(offsets[-1])} rows of {what} where the view has {num_rows}, or covers some "
            "twice; the server's plan and view do not belong together"
        )
    return offsets


def items_of(blocks: RowBlocks, offsets: I64, what: str) -> I64:
    """The item of each block, int64 [r], given the first row of each item and the end.

    Raises:
        RoutingError: a block is not exactly one item.
    """
    found = np.searchsorted(offsets[:-1], blocks.start, side="right") - 1
    if (found < 0).any() or (offsets[found] != blocks.start).any() or (np.diff(offsets)[found] != blocks.rows).any():
        raise RoutingError(f"the routing cuts {what} within an item; the server's plan and view do not belong together")
    return found


def routing_of(routings: Sequence[Routing], source: str, target: str) -> Routing:
    """The routing between two modules; RoutingError if the view has none."""
    for routing in routings:
        if (routing.source_module, routing.target_module) == (source, target):
            return routing
    found = [f"{r.source_module} -> {r.target_module}" for r in routings]
    raise RoutingError(f"the view has no routing {source} -> {target}, only {found}; the server planned another job")
