"""The sequences of a batch with their times, and how some of them are grouped."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.layouts.grouped.compositions import group_compositions
from dataserver.planning.layouts.grouped.costs import GroupCosts

if TYPE_CHECKING:  # kernels are imported where they are called
    from dataserver.planning.kernels.compositions import Scratch

UNLIMITED = 1 << 50
"""A time above every plan's, 13 days in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """One microbatch: sequences on the groups of one composition."""

    members: I64
    """int64 [n], indices into the sorted sequences, ascending."""
    composition: I64
    """int64 [degrees], groups of each degree."""
    group: I64
    """int64 [n], group of each member; groups are numbered smallest degree first."""
    time_ns: int
    """The last group's end, without the fixed time."""


class Batch:
    """A batch's sequences, longest first, with their times; `squares` as in `GroupCosts.times_ns`."""

    def __init__(
        self, lengths: I64, costs: GroupCosts, compositions: I64 | None = None, squares: I64 | None = None
    ) -> None:
        _refuse_overflow(lengths, lengths * lengths if squares is None else squares, costs)
        self.costs = costs
        self.lengths = lengths
        self.times = costs.times_ns(lengths, squares)
        # Attention per token, x 2^16: the sequence with the least takes the least time for each of its tokens.
        self._slope = lengths << 16 if squares is None else (squares << 16) // lengths
        self.floors = costs.floors(lengths)
        self.cells = costs.num_devices // costs.degrees[0]  # a cell is as many devices as the smallest group has
        self.cell_tokens = costs.device_tokens * costs.degrees[0]  # tokens of a cell
        if compositions is None:
            compositions = group_compositions(costs.num_devices, costs.degrees[0], costs.degrees[-1])
        self.compositions = compositions.view()
        self.compositions.flags.writeable = False  # always: kernels are compiled once more for arrays that are writable
        self.prefix: list[int] = [0, *np.cumsum(lengths).tolist()]
        work = self.times << np.arange(len(costs.degrees))
        fits = np.arange(len(costs.degrees)) >= self.floors[:, None]
        least = np.where(fits, work, UNLIMITED << 10).min(axis=1)
        self._work: list[int] = [0, *np.cumsum(least).tolist()]
        self._alone: list[int] = np.where(fits, self.times, UNLIMITED << 10).min(axis=1).tolist()
        self._scratch: Scratch | None = None
        # A degree may exchange faster than a smaller one; the bound takes the best that is as large or larger.
        self._penalties = np.minimum.accumulate(np.array(costs.token_ps, np.int64)[::-1])[::-1].copy()

    @property
    def fewest(self) -> int:
        """Microbatches that the tokens need at least."""
        return -(-int(self.prefix[-1]) // self.costs.cluster_tokens)

    def bound(self, start: int, end: int) -> int:
        """No grouping of sequences [start, end) takes less: their work spread evenly, or the longest one alone."""
        if start == end:
            return 0
        return max((self._work[end] - self._work[start]) // self.cells, self._alone[start])

    def group_run(self, start: int, end: int, limit: int, max_moves: int) -> Grouping | None:
        """The best grouping found of sequences [start, end) that takes less than `limit`."""
        if self.prefix[end] - self.prefix[start] > self.costs.cluster_tokens:
            return None
        return self._group(slice(start, end), np.arange(start, end), limit, max_moves)

    def group(self, members: I64, limit: int, max_moves: int) -> Grouping | None:
        """The best grouping found that takes less than `limit`."""
        if int(self.lengths[members].sum()) > self.costs.cluster_tokens:
            return None
        return self._group(members, members, limit, max_moves)

    def _group(self, chosen: slice | I64, members: I64, limit: int, max_moves: int) -> Grouping | None:
        """The same for `members`, which fit the cluster; `chosen` picks them."""
        from dataserver.planning.kernels import compositions, grouping

        yield_point()
        if not len(members):
            return Grouping(members, self.compositions[0], members, 0) if limit > 0 else None
        if self._scratch is None:
            self._scratch = compositions.scratch_for(len(self.lengths), self.compositions)
        time, best, group = grouping.best_grouping(
            self.lengths[chosen],
            self.times[chosen],
            self.floors[chosen],
            self.cell_tokens,
            self._penalties,
            self.compositions,
            self.cells,
            limit,
            max_moves,
            int(self._slope[chosen].argmin()),
            self._scratch,
        )
        return None if best < 0 else Grouping(members, self.compositions[best], group, int(time))

    def takes(self, taker: Grouping, giver: Grouping) -> I64:
        """Members of `giver` that fit into idle groups of `taker` before it ends. int64, ascending."""
        from dataserver.planning.kernels import grouping

        mine, others = taker.members, giver.members
        taken = grouping.fill(
            self.lengths[mine],
            self.times[mine],
            self.cell_tokens,
            taker.composition,
            taker.group,
            self.lengths[others],
            self.times[others],
            self.floors[others],
            taker.time_ns,
        )
        return others[taken]


def _refuse_overflow(lengths: I64, squares: I64, costs: GroupCosts) -> None:
    """Refuse what the kernels cannot multiply in int64: times by cells, tokens by ps, squares by fs."""
    quadratic = int(squares.max(initial=0)) // 1_000 * costs.quadratic_fs
    linear = int(lengths.max(initial=0)) * max(costs.token_ps)
    slowest = (quadratic + linear) // (1_000 * costs.degrees[0]) * len(lengths) * costs.num_devices
    exchange = int(lengths.sum()) * max(costs.token_ps)
    if slowest >= UNLIMITED << 10 or exchange >= 1 << 62 or quadratic >= 1 << 62:
        raise ValueError(
            f"{costs.name}: {len(lengths)} sequences with up to {int(lengths.max())} tokens take longer than int64"
            " nanoseconds can count; are the cost coefficients in their units (fs, ps, ns)?"
        )
