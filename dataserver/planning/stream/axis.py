"""One dataset as an axis: its epochs one after the other, each laid out shard by shard in an order of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Stream
from dataserver.planning.stream.randomness import Operator, dataset_key, draw


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a step that lies in one shuffle window of one epoch of one dataset."""

    dataset: int
    """Position in the job's dataset list."""
    epoch: int
    shards: tuple[int, ...]
    """Shards of the window, in the order of the epoch."""
    window_start: int
    """Where the window starts, in units from the start of the epoch."""
    first: int
    """First unit that belongs to the step, from the start of the epoch."""
    last: int
    """First unit that no longer does."""


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
        while first < last:
            epoch, offset = self.epoch_at(first)
            length = self._first_length if epoch == self._rest.epoch else self.length
            taken = min(last - first, length - offset)
            yield from self._windows(epoch, offset, offset + taken)
            first += taken

    def before(self, unit: int) -> tuple[int, list[int], Span | None]:
        """What of its epoch lies before a unit of the axis: the epoch, the shards of whole windows, a part of one."""
        epoch, offset = self.epoch_at(unit)
        shards, sums = self._layout(epoch)
        whole = max(0, int(np.searchsorted(sums, offset)) - 1)
        part = list(self._windows(epoch, int(sums[whole]), offset))
        return epoch, shards[: whole * self._stream.shuffle_window].tolist(), part[0] if part else None

    def _windows(self, epoch: int, first: int, last: int) -> Iterator[Span]:
        """The windows that [first, last) of one epoch touches."""
        shards, sums = self._layout(epoch)
        size = self._stream.shuffle_window
        begin, end = np.searchsorted(sums, first, side="right") - 1, np.searchsorted(sums, last, side="left")
        for w in range(int(begin), int(end)):
            window = tuple(shards[w * size : (w + 1) * size].tolist())
            yield Span(self._dataset, epoch, window, int(sums[w]), first, last)

    def _lay_out(self, epoch: int) -> tuple[I64, I64]:
        """Int64 [shards] the shards in the order of an epoch, and int64 [windows + 1] where each window starts."""
        totals = self.totals_in(epoch)
        numbers = np.arange(len(totals), dtype=np.uint64)
        key = dataset_key(self._stream.datasets[self._dataset].name)
        words = draw(self._stream.seed, Operator.SHARD_ORDER, key, epoch, numbers)
        shards = np.lexsort((numbers, words)).astype(np.int64)
        lengths = np.add.reduceat(totals[shards], np.arange(0, len(shards), self._stream.shuffle_window))
        return shards, np.concatenate([[0], np.cumsum(lengths)])
