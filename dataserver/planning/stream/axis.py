"""One dataset as an axis: its epochs one after the other, each laid out shard by shard in an order of its own."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Stream
from dataserver.planning.stream.randomness import Operator, dataset_key, draw
from dataserver.planning.stream.samples import sums_before
from dataserver.planning.stream.sliding import PARTS, SlidingEpoch
from dataserver.planning.stream.windows import Span

SLIDING_SINCE: Final = 2
"""The first order_version whose window slides."""
MAX_EPOCH: Final = 2**32 - 1
"""The last epoch that plans can name."""
AHEAD: Final = 16
"""What is needed is looked at a step and this part of a window ahead."""


class Stretch(NamedTuple):
    """Rows of a shard that a step may need, by where they are: 0 is its beginning, `PARTS` its end."""

    dataset: int
    shard: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """What an earlier stream left of the epoch that a dataset was in."""

    epoch: int
    totals: I64
    """int64 [shards]: units that are left of each shard."""


class Axis:
    """The epochs of one dataset of a stream, in units from where the stream begins."""

    def __init__(self, stream: Stream, dataset: int, totals: I64, rest: Rest | None = None) -> None:
        """Lay out the axis.

        Args:
            stream: the job's stream.
            dataset: position in its list.
            totals: int64 [shards]: units of each shard.
            rest: the axis begins with it, where another stream has begun an epoch; otherwise with epoch 0.
        """
        self._stream, self._dataset = stream, dataset
        self._totals = np.asarray(totals, np.int64)
        self.length = int(self._totals.sum())
        """Units of a whole epoch."""
        self._rest = Rest(0, self._totals) if rest is None else rest
        self._first_length = int(self._rest.totals.sum())
        # The steps of one epoch follow each other; a small dataset may begin several epochs in one step.
        self._layout = lru_cache(2)(self._lay_out)
        self._slides = stream.order_version >= SLIDING_SINCE
        self._sliding = lru_cache(2)(self._lay_out_sliding)
        self._longest = stream.seq_len if stream.packing.enabled else 1

    def end_of(self, epochs: int) -> int:
        """Where so many epochs are complete, the part of them that other streams had included."""
        return max(0, self._first_length + (epochs - 1 - self._rest.epoch) * self.length)

    def epoch_at(self, unit: int) -> tuple[int, int]:
        """The epoch in which a unit of the axis lies, and its distance from where that epoch starts."""
        if unit < self._first_length:
            return self._rest.epoch, unit
        later, offset = divmod(unit - self._first_length, self.length)
        return self._rest.epoch + 1 + later, offset

    def totals_in(self, epoch: int) -> I64:
        """Units of each shard in an epoch, int64 [shards]."""
        return self._rest.totals if epoch == self._rest.epoch else self._totals

    def spans(self, first: int, last: int) -> Iterator[Span]:
        """The windows that [first, last) of the axis touches, in axis order."""
        for part in self._epochs(first, last):
            yield from self._windows(*part)

    def needed(self, first: int, last: int) -> Iterator[Stretch]:
        """What [first, last) of the axis and a little more may read, in axis order; some of it twice."""
        if first == last:
            return
        num_shards = len(self._totals)
        window = self.length * min(self._stream.shuffle_window, num_shards) // num_shards
        for epoch, *part in self._epochs(first, last + window // AHEAD):
            if self._slides:
                layout = self._sliding(epoch)
                for index, low, high in layout.stretches(*part):
                    yield Stretch(self._dataset, int(layout.shards[index]), low, high)
            else:
                for span in self._windows(epoch, *part):
                    yield from (Stretch(self._dataset, shard, 0, PARTS) for shard in span.shards)

    def before(self, unit: int) -> tuple[int, list[int], list[Span]]:
        """What of its epoch lies before a unit of the axis.

        Returns:
            The epoch, shards with nothing behind the unit, and spans with what lies before it of the others.
        """
        epoch, offset = self.epoch_at(unit)
        if self._slides:
            layout = self._sliding(epoch)
            slots = layout.slots(offset, offset + 1, self._longest)
            whole = layout.indexes(slots.start).start
            begun = bisect_left(range(slots.start), True, key=lambda slot: layout.indexes(slot).stop > whole)
            spans = [self._slot_span(epoch, layout, slot, 0, offset) for slot in range(begun, slots.stop)]
            return epoch, layout.shards[:whole].tolist(), spans
        shards, sums = self._layout(epoch)
        whole = max(0, int(np.searchsorted(sums, offset)) - 1)
        part = list(self._windows(epoch, int(sums[whole]), offset))
        return epoch, shards[: whole * self._stream.shuffle_window].tolist(), part

    def _epochs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The epochs in which [first, last) of the axis lies, with its part of each."""
        while first < last:
            epoch, offset = self.epoch_at(first)
            length = self._first_length if epoch == self._rest.epoch else self.length
            taken = min(last - first, length - offset)
            yield epoch, offset, offset + taken
            first += taken

    def _windows(self, epoch: int, first: int, last: int) -> Iterator[Span]:
        """The windows that [first, last) of one epoch touches."""
        if self._slides:
            layout = self._sliding(epoch)
            for slot in layout.slots(first, last, self._longest):
                yield self._slot_span(epoch, layout, slot, first, last)
            return
        shards, sums = self._layout(epoch)
        size = self._stream.shuffle_window
        begin, end = np.searchsorted(sums, first, side="right") - 1, np.searchsorted(sums, last, side="left")
        for w in range(int(begin), int(end)):
            window = tuple(shards[w * size : (w + 1) * size].tolist())
            yield Span(self._dataset, epoch, window, int(sums[w]), first, last, w)

    def _slot_span(self, epoch: int, layout: SlidingEpoch, slot: int, first: int, last: int) -> Span:
        """What lies in [first, last) of one slot."""
        indexes = layout.indexes(slot)
        shards = tuple(layout.shards[indexes.start : indexes.stop].tolist())
        start = int(layout.sums[indexes.start])
        return Span(self._dataset, epoch, shards, start, first, last, slot, layout)

    def _lay_out(self, epoch: int) -> tuple[I64, I64]:
        """Int64 [shards] the shards in the order of an epoch, and int64 [windows + 1] where each window starts."""
        shards = self._permuted(epoch)
        lengths = np.add.reduceat(self.totals_in(epoch)[shards], np.arange(0, len(shards), self._stream.shuffle_window))
        return shards, sums_before(lengths)

    def _lay_out_sliding(self, epoch: int) -> SlidingEpoch:
        """An epoch of a window that slides. It begins with the shards with which the one before it ended.

        Half a window of shards is under way at either end of an epoch: servers hold these when the next one begins, so
        no more bytes are needed then than at other times. What an epoch ends with does not depend on earlier ones.
        """
        shards, window = self._permuted(epoch), self._stream.shuffle_window
        if epoch and len(shards) > window:
            half = (window + 1) // 2
            goes_on = np.isin(shards, self._permuted(epoch - 1)[-half:])
            goes_on[-half:] = False
            shards = np.concatenate([shards[goes_on], shards[~goes_on]])
        return SlidingEpoch.of(shards, self.totals_in(epoch)[shards], window)

    def _permuted(self, epoch: int) -> I64:
        """The shards in an order of their own for each epoch, int64 [shards]."""
        numbers = np.arange(len(self._totals), dtype=np.uint64)
        key = dataset_key(self._stream.datasets[self._dataset].name)
        words = draw(self._stream.seed, Operator.SHARD_ORDER, key, epoch, numbers)
        return np.lexsort((numbers, words)).astype(np.int64)
