"""Shards as tables and samples of steps, without any file."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.identity import Job
from dataserver.planning.stream.gathering import Window, gather_window
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.samples import ROW_BITS, SampleSizes, ShardTable, StepSamples, Task
from dataserver.planning.stream.sizing import concatenate, shard_table, size_samples
from dataserver.planning.stream.windows import Span, units_of


def make_table(job: Job, rng: np.random.Generator, num_samples: int, max_images: int = 1) -> ShardTable:
    """A synthetic shard: 0..max_images images a sample, captions of 0..300 tokens, some rows left out."""
    counts = rng.integers(0, max_images + 1, num_samples)
    num_images = int(counts.sum())
    return shard_table(
        job.stream,
        np.sort(rng.choice(2 * num_samples + 1, num_samples, replace=False)).astype(np.int64),
        rng.integers(0, 300, num_samples),
        np.concatenate([[0], np.cumsum(counts)]),
        rng.integers(16, 600, num_images).astype(np.int32),
        rng.integers(16, 600, num_images).astype(np.int32),
    )


def make_samples(job: Job, num_samples: int, seed: int = 0, max_images: int = 1) -> StepSamples:
    """Synthetic samples of one step."""
    table = make_table(job, np.random.default_rng(seed), num_samples, max_images)
    return size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)


def mixed_samples(job: Job, count: int, seed: int = 0, max_images: int = 1) -> StepSamples:
    """Synthetic samples of all datasets of a job in turn."""
    rng, number = np.random.default_rng(seed), len(job.stream.datasets)
    parts = []
    for position in range(number):
        table = make_table(job, rng, (count + position) // number, max_images)
        parts.append(size_samples(job.stream, position, 0, table.row.astype(np.uint64), table))
    return concatenate(parts)


def texts(lengths: I64) -> StepSamples:
    """Samples of text alone, of so many tokens."""
    n = len(lengths)
    zeros, none = np.zeros(n, np.int64), np.zeros(0, np.int32)
    return StepSamples(
        dataset=zeros.astype(np.int32),
        epoch=zeros,
        sample=np.arange(n).astype(np.uint64),
        task=np.full(n, Task.UNDERSTANDING, np.int32),
        text_tokens=lengths - 2,
        truncated_tokens=zeros,
        tokens=lengths,
        image_offsets=np.zeros(n + 1, np.int64),
        image_rows=none,
        image_columns=none,
    )


class SyntheticDatasets:
    """The shards of a job's datasets as tables, and the order over them; counts which tables are asked for."""

    def __init__(self, job: Job, tables: Sequence[Sequence[ShardTable]]) -> None:
        self.job, self.tables = job, tables
        totals = [np.array([units_of(job.stream, t).sum() for t in shards], np.int64) for shards in tables]
        self.order = StreamOrder(job.stream, job.spec.execution.end, totals)

    def ids(self, step: int) -> list[tuple[int, int, int]]:
        """(dataset, pass, sample) of a step in canonical order."""
        found = []
        for span in self.order.spans(step):
            found += [(span.dataset, span.epoch, number) for number in self.numbers(span)]
        return found

    def windows(self, span: Span) -> tuple[Window]:
        """The window in which a span lies."""
        return (gather_window(self.order, span, [self.tables[span.dataset][s] for s in span.shards]),)

    def numbers(self, span: Span) -> list[int]:
        """The numbers of the samples of a span in canonical order."""
        (window,) = self.windows(span)
        numbers: list[int] = window.sample[(window.first >= span.first) & (window.first < span.last)].tolist()
        return numbers

    def samples(self, step: int) -> StepSamples:
        """The sized samples of a step."""
        parts = []
        for span in self.order.spans(step):
            tables, numbers = self.tables[span.dataset], self.numbers(span)
            every = [sample_number(s, row) for s, table in enumerate(tables) for row in table.row.tolist()]
            picked = pick(tables, np.array([every.index(number) for number in numbers], np.int64))
            of = size_samples(self.job.stream, span.dataset, span.epoch, np.array(numbers, np.uint64), picked)
            parts.append(of)
        return concatenate(parts)


def pick(tables: Sequence[ShardTable], at: I64) -> SampleSizes:
    """Sizes of samples of several tables, by where they are in all of them, one by one."""
    every = [(t, p) for t, table in enumerate(tables) for p in range(len(table.row))]
    rows = [every[i] for i in at.tolist()]
    images = [(t, i) for t, p in rows for i in range(tables[t].image_offsets[p], tables[t].image_offsets[p + 1])]
    counts = [int(np.diff(tables[t].image_offsets)[p]) for t, p in rows]
    return SampleSizes(
        text_tokens=np.array([tables[t].text_tokens[p] for t, p in rows], np.int64),
        image_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        image_rows=np.array([tables[t].image_rows[i] for t, i in images], np.int32),
        image_columns=np.array([tables[t].image_columns[i] for t, i in images], np.int32),
    )


def sample_number(shard: int, row: int) -> int:
    return (shard << ROW_BITS) | row
