"""The order of the samples within shuffle windows, which does not depend on where windows lie on their axis."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dataserver.planning import I64, U64
from dataserver.planning.job.fields import Stream
from dataserver.planning.stream.randomness import Operator, dataset_key, draw
from dataserver.planning.stream.samples import ROW_BITS, ShardTable
from dataserver.planning.stream.sliding import SlidingEpoch


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a step that lies in one shuffle window of one epoch of a dataset, or in a slot of one that slides."""

    dataset: int
    """Position in the job's dataset list."""
    epoch: int
    shards: tuple[int, ...]
    """Shards with samples in the window, in the order of the epoch."""
    window_start: int
    """Where the window starts, in units from the start of the epoch, but for samples of its shards in earlier slots."""
    first: int
    """First unit that belongs to the step, from the start of the epoch."""
    last: int
    """First unit that no longer does."""
    number: int
    """Position of the window or slot within the epoch."""
    sliding: SlidingEpoch | None = None
    """The epoch, where the window slides; there alone."""


class Part(NamedTuple):
    """The k samples of a shard that lie in a window."""

    at: I64 | None
    """int64 [k]: where they are in the shard's table; None where they are the whole table."""
    sample: U64
    """Numbers of the samples, uint64 [k]."""
    words: U64
    """uint64 [k]: by which the samples of a window are sorted."""
    units: I64
    """int64 [k]: the length of each on the axis."""
    before: int
    """Units of the shard's samples in earlier slots."""


class WindowOrder:
    """The order of samples within the shuffle windows of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def part(self, span: Span, at: int, table: ShardTable) -> Part:
        """The samples of a shard in the window in which a span lies.

        Args:
            span: from `spans`.
            at: position of the shard in `span.shards`.
            table: of the shard.
        """
        sample, units = self.numbers(span.shards[at], table), units_of(self.stream, table)
        words = self.draws(span, sample, table)
        if span.sliding is None:
            return Part(None, sample, words, units, 0)
        together = table.parts is not None and self._are_together(span)
        index = span.sliding.indexes(span.number)[at]
        chosen = span.sliding.part(span.number, index, words, units, sample if together else None)
        return Part(chosen.at, sample[chosen.at], chosen.words, units[chosen.at], chosen.before)

    def merged(self, span: Span, parts: Iterable[Part]) -> tuple[U64, I64, I64]:
        """All samples of the window in which a span lies; spans of one window share them.

        Args:
            span: from `spans`.
            parts: those of `span.shards`, in that order.

        Returns:
            uint64 [n] numbers of the samples in canonical order, int64 [n] the first unit of each, from the start of
            the epoch, and int64 [n] where each is in the parts, one after the other.
        """
        from dataserver.planning.kernels.gathered import order_of_draws

        _, samples, all_words, all_units, before = zip(*parts, strict=True)
        sample, words = np.concatenate(samples), np.concatenate(all_words)
        order = order_of_draws(words)  # a fraction of what `lexsort` takes, needed only where two words are equal
        ordered = words[order]
        if (ordered[1:] == ordered[:-1]).any():
            order = np.lexsort((sample, words))  # parts of a document stay in their order
        units = np.concatenate(all_units)[order]
        return sample[order], span.window_start + sum(before) + np.cumsum(units) - units, order

    def numbers(self, shard: int, table: ShardTable) -> U64:
        """The numbers of the samples of a shard, uint64 [n]: shard << ROW_BITS | row."""
        return (np.uint64(shard) << np.uint64(ROW_BITS)) | table.row.astype(np.uint64)

    def draws(self, span: Span, sample: U64, table: ShardTable) -> U64:
        """The words by which samples of the window in which a span lies are sorted, uint64 [n].

        All parts of a document have the same one where the stream wants them together.

        Args:
            span: from `spans`.
            sample: uint64 [n], numbers of the samples.
            table: of their shard.
        """
        key = dataset_key(self.stream.datasets[span.dataset].name)
        words = draw(self.stream.seed, Operator.SAMPLE_ORDER, key, span.epoch, sample)
        if table.parts is None or self._are_together(span):
            return words
        later = np.flatnonzero(table.parts[:, 0])
        keyed = words[later] + table.parts[later, 0].astype(np.uint64)  # beyond 2^64 it begins with 0 again
        words[later] = draw(self.stream.seed, Operator.PART_ORDER, key, span.epoch, keyed)
        return words

    def _are_together(self, span: Span) -> bool:
        documents = self.stream.datasets[span.dataset].documents
        return documents is not None and documents.together


def units_of(stream: Stream, table: ShardTable) -> I64:
    """Length of each sample on its dataset's axis: nominal tokens, or one without packing."""
    return table.nominal if stream.packing.enabled else np.ones(len(table.row), np.int64)
