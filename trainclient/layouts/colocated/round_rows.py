"""Numbers the rows of a rank's microbatches of one round, so that both ends know from their views which go where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.plan.plan import Routing
from trainclient.exchange.message_queue import RowSelection
from trainclient.exchange.routing import RowBlocks

RowSelections = tuple[RowSelection, ...]
"""The rows that each rank gets, or gives."""
_START_BITS = 32
"""Bits of a row's number within its microbatch, a uint32 in the protocol."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundRows:
    """The consecutive rows of a rank's microbatches of one round, at one end of a module."""

    first: int
    """The first microbatch of the round."""
    base: I64
    """int64 [microbatches + 1]: first row of each microbatch, and the end."""
    offsets: I64
    """int64 [k + 1]: first row of each item, and the end."""
    selections: tuple[RowSelections, ...]
    """The rows of each rank, for each edge."""

    def rows(self, microbatch: int) -> slice:
        """The range of a microbatch."""
        number = microbatch - self.first
        return slice(*self.base[number : number + 2].tolist())

    def items(self, microbatch: int) -> slice:
        """The range of a microbatch."""
        rows = self.rows(microbatch)
        return slice(*np.searchsorted(self.offsets[:-1], [rows.start, rows.stop]).tolist())


def round_blocks(routings: Sequence[Routing], side: Callable[[Routing], RowBlocks], base: I64) -> RowBlocks:
    """The blocks of all microbatches by the numbers of their rows, in the order in which they are sent."""
    several = [side(routing) for routing in routings]
    leaving = [(r.source_microbatch << _START_BITS) | r.source_start for r in routings]
    return RowBlocks(
        rank=np.concatenate([blocks.rank for blocks in several]),
        start=np.concatenate([blocks.start + first for blocks, first in zip(several, base, strict=False)]),
        rows=np.concatenate([blocks.rows for blocks in several]),
        order=np.concatenate(leaving),
    )
