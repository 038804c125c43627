"""A shuffle window without an edge: one epoch of one dataset in order version 2.

Shards lie one after the other, in the order of the epoch, and each sample has its place among them by its row. A draw
moves it by up to half a window to either side; where it would leave the epoch it is turned back. So at any time a
window's samples are mixed, shards come in one by one and from their first block to their last, and as many bytes are
needed from one step to the next. A dataset that a window holds as a whole is mixed as a whole.

Steps are found without a sum over samples. The samples of a shard in their new order are divided by units, as the draws
would on average: how much of a shard lies before a position follows from its length alone. Slots of some shards' width
are sorted one at a time.

Positions are counted in half shards from the start of the epoch, with 32 binary digits behind the point.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np

from dataserver.planning import I64, U64
from dataserver.planning.stream.samples import sums_before

_POINT: Final = 32
"""Binary digits of a position behind the point."""
_SLOTS: Final = 32
"""A slot is one shard wide, or this fraction of a window, or of a smaller dataset: for each shard's worth of samples in
it, the tables of about so many are looked at."""
_CHANCE: Final = 16
"""Most samples lie within a window and this fraction of it."""
PARTS: Final = 1 << 16
"""A shard is divided into so many to say which of its rows are meant."""


class Part(NamedTuple):
    """The k samples of a shard that lie in a slot."""

    at: I64
    """int64 [k]: where they are in the shard's table."""
    words: U64
    """uint64 [k]: by which the samples of the slot are sorted."""
    before: int
    """Units of the shard's samples in earlier slots."""


@dataclass(frozen=True, slots=True, eq=False)
class SlidingEpoch:
    """Where the n shards of an epoch and their samples lie."""

    shards: I64
    """int64 [n]: the shards in their order."""
    lengths: I64
    """int64 [n]: units of each."""
    sums: I64
    """int64 [n + 1]: units of all shards before each."""
    reach: int
    """How far a draw moves a sample at most to either side."""
    borders: I64
    """int64 [s + 1]: the positions between which slots lie."""
    starts: I64
    """int64 [s + 1]: the first unit of each slot; where samples have several units, it may be later by those of one
    sample for each shard that is under way."""

    @classmethod
    def of(cls, shards: I64, lengths: I64, window: int) -> Self:
        """Lay out an epoch.

        Args:
            shards: int64 [n], in the order of the epoch.
            lengths: int64 [n], units of each.
            window: shards that are mixed.
        """
        n = len(shards)
        slot = max(1, min(window, n) // _SLOTS)
        borders = np.minimum(2 * slot * np.arange(-(-n // slot) + 1), 2 * n)
        sums = sums_before(lengths)
        found = cls(shards, lengths, sums, window if n > window else 2 * n, borders, borders)
        first = found._unfinished(borders)
        starts = sums[first]
        for offset in range(min(n, found.reach + 2)):
            index = np.minimum(first + offset, n - 1)
            starts = starts + np.where(first + offset < n, found._before(index, borders), 0)
        return cls(shards, lengths, sums, found.reach, borders, starts)

    def slots(self, first: int, last: int, longest: int) -> range:
        """The slots in which samples may begin that begin in [first, last), with at most `longest` units each."""
        late = 0 if longest == 1 else longest * min(len(self.shards), self.reach + 2)
        begin, end = np.searchsorted(self.starts[1:], first - late, "right"), np.searchsorted(self.starts, last, "left")
        return range(int(begin), min(int(end), len(self.borders) - 1))

    def indexes(self, slot: int) -> range:
        """The shards with samples in a slot, by their position in the epoch."""
        begin, end = self.borders[slot : slot + 2]
        return range(int(self._unfinished(begin)), min(len(self.shards), -(-int(end + self.reach) // 2)))

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shards with samples that may begin in [first, last), and from where to where their rows lie.

        Each is given by its position in the epoch, and two numbers from 0 to `PARTS`. Few samples lie elsewhere, as
        shards are divided by the mean of the draws.
        """
        reach = self.reach * PARTS * (_CHANCE + 1) // _CHANCE
        low, high = self._position(first) - reach, self._position(last) + reach
        for index in range(max(0, low // (2 * PARTS)), min(len(self.shards), -(-high // (2 * PARTS)))):
            begin = 2 * PARTS * index
            yield index, max(0, (low - begin) // 2), min(PARTS, (high - begin + 1) // 2)

    def _position(self, unit: int) -> int:
        """About where a unit of the epoch lies, in half shards x `PARTS`."""
        slot = max(0, min(int(np.searchsorted(self.starts, unit, "right")), len(self.borders) - 1) - 1)
        begin, end = (int(border) * PARTS for border in self.borders[slot : slot + 2])
        start, stop = (int(start) for start in self.starts[slot : slot + 2])
        return begin + (end - begin) * min(unit - start, stop - start) // max(1, stop - start)

    def part(self, slot: int, index: int, draws: U64, units: I64, together: U64 | None = None) -> Part:
        """The samples of a shard that lie in a slot, in their order.

        Args:
            slot: the slot.
            index: the shard's position in the epoch.
            draws: uint64 [n], a word for each sample of the shard.
            units: int64 [n], how long each is.
            together: uint64 [n], ascending; samples of the same number come to lie where the first of them does.
        """
        from dataserver.planning.kernels.gathered import order_of_draws

        words = self._positions(index, draws)
        if together is not None:
            words = words[np.searchsorted(together, together, "left")]
        order = order_of_draws(words)
        if (words[order[1:]] == words[order[:-1]]).any():
            order = np.argsort(words, kind="stable")
        begins = sums_before(units[order])
        low, high = np.searchsorted(begins[:-1], self._before(np.array([index]), self.borders[slot : slot + 2]))
        return Part(order[low:high], words[order[low:high]], int(begins[low]))

    def _positions(self, index: int, draws: U64) -> U64:
        """Where the samples of a shard come to lie, uint64 [n]."""
        moved = (draws >> np.uint64(64 - _POINT)).astype(np.int64) * (2 * self.reach)
        row = np.arange(len(draws)) * ((2 << _POINT) // max(1, len(draws)))
        found = np.abs(((2 * index - self.reach) << _POINT) + row + moved)
        end = 2 * len(self.shards) << _POINT
        turned: U64 = np.where(found > end, 2 * end - found, found).astype(np.uint64)
        return turned

    def _unfinished(self, border: I64) -> I64:
        """The first shard with samples at or behind a position."""
        return np.maximum(0, (border - self.reach) // 2)

    def _before(self, index: I64, border: I64) -> I64:
        """Units of shards before positions, by the average over draws. int64 [k]."""
        whole = 8 * self.reach
        n, first = len(self.shards), 2 * index - self.reach
        # Positions from -border to border, and those that are turned back from beyond the end.
        share = self._share(border - first) - self._share(-border - first)
        share = share + whole - self._share(4 * n - border - first)
        length = self.lengths[index]
        units: I64 = length // whole * share + length % whole * share // whole
        return units

    def _share(self, at: I64) -> I64:
        """How much of a shard lies within `at` of its first position, in parts of 8 x reach."""
        at = np.clip(at, 0, 2 * self.reach + 2)
        left = 2 * self.reach + 2 - at
        return np.where(at < 2, at * at, np.where(left < 2, 8 * self.reach - left * left, 4 * (at - 1)))
