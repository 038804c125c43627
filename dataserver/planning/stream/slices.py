"""Shuffle windows that are too large to be sorted as a whole, in slices.

The samples of a window are ordered by a draw each (`order.py`), so those whose draw begins with certain bits lie side
by side. One look at all samples counts the units that they take; from then on any slice of the window is found from the
shards alone, one after the other, and takes the memory of its own samples. What steps get is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.job.fields import MAX_INTEGER
from dataserver.planning.stream.gathering import Window, gather_window, pick_rows
from dataserver.planning.stream.samples import ShardTable, sums_before
from dataserver.planning.stream.windows import Span, WindowOrder, units_of

Table = Callable[[int], ShardTable]
"""The table of a shard of the dataset."""

_BITS: Final = 12
"""Leading bits of a draw that tell slices apart: the smallest slice is a 4,096th of its window."""
_SAMPLE_BYTES: Final = 48
_IMAGE_BYTES: Final = 8
"""In the arrays of a window."""


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """How a window is cut into s slices."""

    begin: I64
    """int64 [s + 1]: slice k has the samples whose draw begins with bits from begin[k] to before begin[k + 1]."""
    first: I64
    """int64 [s + 1]: where slice k begins, in units from the start of the epoch; and, or more, where the last ends."""

    def __len__(self) -> int:
        return len(self.begin) - 1

    def of(self, span: Span) -> range:
        """The slices in which a span of the window lies."""
        begin = int(np.searchsorted(self.first[:-1], span.first, side="right")) - 1
        return range(max(0, begin), int(np.searchsorted(self.first[:-1], span.last, side="left")))


def whole(span: Span) -> Slices:
    """The window in which a span lies in one piece."""
    return Slices(np.array([0, 1 << _BITS]), np.array([span.window_start, MAX_INTEGER]))


def cut(order: WindowOrder, span: Span, table: Table, slice_bytes: int) -> Slices:
    """Cut the window in which a span lies into slices of about `slice_bytes`."""
    units, sizes = np.zeros(1 << _BITS, np.int64), np.zeros(1 << _BITS, np.int64)
    for shard in span.shards:
        yield_point()
        found = table(shard)
        at = _leading(order, span, shard, found)
        np.add.at(units, at, units_of(order.stream, found))
        np.add.at(sizes, at, _SAMPLE_BYTES + _IMAGE_BYTES * np.diff(found.image_offsets))
    before = sums_before(sizes)
    begin = np.flatnonzero(np.diff(before[:-1] // slice_bytes, prepend=-1))
    begin = begin[before[begin] < before[-1]]
    first = span.window_start + sums_before(units)
    begin = np.append(begin, 1 << _BITS)
    return Slices(begin, first[begin])


def gather_slice(order: WindowOrder, span: Span, table: Table, slices: Slices, number: int) -> Window:
    """One slice of the window in which a span lies."""
    begin, end = slices.begin[number : number + 2].tolist()
    parts = []
    for shard in span.shards:
        yield_point()
        found = table(shard)
        at = _leading(order, span, shard, found)
        position = np.flatnonzero((at >= begin) & (at < end))
        parts.append(pick_rows(found, position))
    return gather_window(order, replace(span, window_start=int(slices.first[number])), parts)


def _leading(order: WindowOrder, span: Span, shard: int, table: ShardTable) -> I64:
    """The first bits of each sample's draw, int64 [n]."""
    return (order.draws(span, order.numbers(shard, table), table) >> np.uint64(64 - _BITS)).astype(np.int64)
