"""Which samples a step holds: the canonical order and random access to it (order version 1).

Each dataset is an axis. An epoch of it is laid out shard by shard in a keyed permutation of the shards; groups of
`shuffle_window` consecutive shards are windows, and the samples of a window are sorted by a keyed draw. A sample's
length on the axis is its nominal tokens, or one without packing. Epoch p occupies [p L, (p + 1) L), L being the length
of the dataset, and step k takes the samples whose first unit falls between the bounds of steps k and k + 1. So a step
is found from the totals of the shards and the tables of the few shards in its windows, whatever the dataset's size.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor, lcm

import numpy as np

from dataserver.planning import I64, U64
from dataserver.planning.job.fields import MAX_INTEGER, End, LastStep, Stream
from dataserver.planning.stream.randomness import Operator, dataset_key, draw
from dataserver.planning.stream.samples import ROW_BITS, ShardTable


class DatasetEmptyError(ValueError):
    """Filter and quarantine leave nothing of a dataset of the mixture."""


class StepOutOfRangeError(ValueError):
    """A step beyond the end of the job."""


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


class StreamOrder:
    """The canonical order of a stream over datasets whose shard totals are known."""

    def __init__(self, stream: Stream, end: End, shard_totals: Sequence[I64]) -> None:
        """Lay out the axes.

        Args:
            stream: the job's stream.
            end: when the job ends.
            shard_totals: for each dataset int64 [shards]: units of each shard in name order (sums of `units_of`).

        Raises:
            DatasetEmptyError: a dataset with a positive weight has no unit, or nothing fills a step.
            ValueError: the job would take more steps than JSON can count.
        """
        self.stream = stream
        self._totals = [np.asarray(t, np.int64) for t in shard_totals]
        # The steps of one epoch follow each other; a small dataset may begin several epochs in one step.
        self._pass = lru_cache(2 * len(self._totals))(self._lay_out)
        self._lengths = [int(t.sum()) for t in self._totals]
        self._shares = stream.weight_shares()
        for spec, totals, length, share in zip(stream.datasets, self._totals, self._lengths, self._shares, strict=True):
            if share > 0 and length == 0:
                raise DatasetEmptyError(
                    f"dataset {spec.name}: filter {spec.filter!r} and quarantine leave no sample of "
                    f"{len(totals)} shards; at least one is required, so loosen the filter or set the weight to 0"
                )
        self.num_steps, self._stops = self._find_end(end)

    def in_step(self, counts: Sequence[int]) -> int:
        """How many of something a step has on average over an epoch, from how many each dataset has."""
        quotas = self._bounds(1)
        return sum(q * n // length for q, n, length in zip(quotas, counts, self._lengths, strict=True) if length)

    def repeats(self, run: int) -> list[int]:
        """How often a sample of each dataset can be among `run` consecutive ones of a step, without packing.

        Once unless an epoch ends, once more for each epoch that then begins, and not at all without a weight.
        """
        taken = self._bounds(self.num_steps)
        return [
            int(count > 0) if count <= length else 1 + -(-(run - 1) // length)
            for count, length in zip(taken, self._lengths, strict=True)
        ]

    def check(self, step: int) -> None:
        """Raise StepOutOfRangeError if the job ends before a step."""
        if not 0 <= step < self.num_steps:
            raise StepOutOfRangeError(f"step {step} does not exist; the job ends after step {self.num_steps - 1}")

    def spans(self, step: int) -> list[Span]:
        """The windows that a step touches, dataset by dataset in axis order.

        Raises:
            StepOutOfRangeError: the job ends before.
        """
        self.check(step)
        firsts, lasts = self._bounds(step), self._bounds(step + 1)
        if step == self.num_steps - 1:
            lasts = [self._stops.get(dataset, last) for dataset, last in enumerate(lasts)]
        return [
            span
            for dataset, (first, last) in enumerate(zip(firsts, lasts, strict=True))
            for span in self._spans_of(dataset, first, last)
        ]

    def window(self, span: Span, tables: Sequence[ShardTable]) -> tuple[U64, I64, I64]:
        """All samples of the window in which a span lies; spans of one window share them.

        Args:
            span: from `spans`.
            tables: the tables of `span.shards`, in that order.

        Returns:
            uint64 [n] numbers of the samples in canonical order, int64 [n] the first unit of each, from the start of
            the epoch, and int64 [n] where each is in the tables, one after the other.
        """
        from dataserver.planning.kernels.gathered import order_of_draws

        sample = np.concatenate([self.numbers(s, t) for s, t in zip(span.shards, tables, strict=True)])
        words = self.draws(span, sample)
        order = order_of_draws(words)  # a fraction of what `lexsort` takes, needed only where two words are equal
        ordered = words[order]
        if (ordered[1:] == ordered[:-1]).any():
            order = np.lexsort((sample, words))
        units = np.concatenate([units_of(self.stream, t) for t in tables])[order]
        return sample[order], span.window_start + np.cumsum(units) - units, order

    def length_of(self, dataset: int, shard: int) -> int:
        """The length of a shard on its dataset's axis."""
        return int(self._totals[dataset][shard])

    def numbers(self, shard: int, table: ShardTable) -> U64:
        """The numbers of the samples of a shard, uint64 [n]: shard << ROW_BITS | row."""
        return (np.uint64(shard) << np.uint64(ROW_BITS)) | table.row.astype(np.uint64)

    def draws(self, span: Span, sample: U64) -> U64:
        """The words by which samples of the window in which a span lies are sorted, uint64 [n]."""
        key = dataset_key(self.stream.datasets[span.dataset].name)
        return draw(self.stream.seed, Operator.SAMPLE_ORDER, key, span.epoch, sample)

    def _spans_of(self, dataset: int, first: int, last: int) -> list[Span]:
        """The windows that [first, last) of a dataset's axis touches."""
        length = self._lengths[dataset]
        found: list[Span] = []
        while first < last:
            epoch, offset = divmod(first, length)
            stop = min(last - first, length - offset)
            found += self._windows(dataset, epoch, offset, offset + stop)
            first += stop
        return found

    def _windows(self, dataset: int, epoch: int, first: int, last: int) -> list[Span]:
        """The windows that [first, last) of one epoch touches."""
        shards, sums = self._pass(dataset, epoch)
        size = self.stream.shuffle_window
        begin, end = np.searchsorted(sums, first, side="right") - 1, np.searchsorted(sums, last, side="left")
        return [
            Span(dataset, epoch, tuple(int(s) for s in shards[w * size : (w + 1) * size]), int(sums[w]), first, last)
            for w in range(int(begin), int(end))
        ]

    def _lay_out(self, dataset: int, epoch: int) -> tuple[I64, I64]:
        """Int64 [shards] the shards in the order of an epoch, and int64 [windows + 1] where each window starts."""
        totals = self._totals[dataset]
        numbers = np.arange(len(totals), dtype=np.uint64)
        key = dataset_key(self.stream.datasets[dataset].name)
        words = draw(self.stream.seed, Operator.SHARD_ORDER, key, epoch, numbers)
        shards = np.lexsort((numbers, words)).astype(np.int64)
        lengths = np.add.reduceat(totals[shards], np.arange(0, len(shards), self.stream.shuffle_window))
        return shards, np.concatenate([[0], np.cumsum(lengths)])

    def _bounds(self, step: int) -> list[int]:
        """Where a step starts on each dataset's axis (design law 2)."""
        stream = self.stream
        if stream.packing.enabled:
            tokens = step * Fraction(stream.packing.fill) * stream.global_batch * stream.seq_len
            return [floor(share * tokens) for share in self._shares]
        return self._sample_bounds(step)

    def _sample_bounds(self, step: int) -> list[int]:
        """Samples that all steps before this one take of each dataset: `step x global_batch` in all.

        Each dataset takes its share, rounded down, of what the ones before it leave. What is left grows with the step
        by no more than a batch, so no bound ever falls, and the sum is exact in every step.
        """
        scale = lcm(*(share.denominator for share in self._shares))
        left, weight_left = step * self.stream.global_batch, scale
        bounds = []
        for share in self._shares:
            weight = share.numerator * (scale // share.denominator)
            taken = left * weight // weight_left if weight else 0
            bounds.append(taken)
            left, weight_left = left - taken, weight_left - weight
        return bounds

    def _find_end(self, end: End) -> tuple[int, dict[int, int]]:
        """The number of steps, and where the axes of the datasets that end inside the last one stop."""
        if end.epochs is None:
            return end.steps or 0, {}
        goals = {d: end.epochs * self._lengths[d] for d, share in enumerate(self._shares) if share}

        def complete(step: int) -> bool:
            bounds = self._bounds(step)
            return all(bounds[d] >= goal for d, goal in goals.items())

        high = 1
        while not complete(high):
            high *= 2
            if high > MAX_INTEGER:
                raise ValueError(
                    f"the job would take more than {MAX_INTEGER} steps to complete {end.epochs} epochs of every "
                    "dataset; raise the smallest weight, or set it to 0, or end the job with end.steps"
                )
        steps = bisect_left(range(high), True, key=complete)
        before, after = self._bounds(steps - 1), self._bounds(steps)
        stops = {d: goal for d, goal in goals.items() if before[d] < goal < after[d]}
        if stops and end.last is LastStep.DROP:
            steps, stops = steps - 1, {}
        if steps == 0:
            raise DatasetEmptyError(
                "the datasets do not fill a single step and end.last is drop; lower global_batch or set end.last to pad"
            )
        return steps, stops


def units_of(stream: Stream, table: ShardTable) -> I64:
    """Length of each sample on its dataset's axis: nominal tokens, or one without packing."""
    return table.nominal if stream.packing.enabled else np.ones(len(table.row), np.int64)
