"""A job over open datasets: from the indexes to the plans of its steps."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataserver.dataset.cache import LruCache
from dataserver.dataset.dataset import Dataset
from dataserver.dataset.filters import Filter, compile_filter
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import DatasetSpec
from dataserver.planning.layout import layout_of
from dataserver.planning.order import Span, StreamOrder, units_of
from dataserver.planning.plan import StepPlan
from dataserver.planning.planner import plan_step
from dataserver.planning.samples import I64, ShardTable, StepSamples
from dataserver.planning.sizing import concatenate, shard_table, size_samples

Value = TypeVar("Value")

TABLES_CACHE_BYTES: Final = 512 << 20
"""Sized tables of shards that a server keeps for all jobs: 80 bytes a sample, so about six million samples."""

PLANS_KEPT: Final = 16
"""Plans kept per job: streams of one job are rarely more than a few steps apart."""


class JobPlanner:
    """Plans the steps of one job, each once, for all streams. Thread-safe."""

    def __init__(self, job: Job, datasets: Sequence[Dataset], tables: LruCache[ShardTable] | None = None) -> None:
        """Size every shard of the job's datasets once, to lay out the axes.

        Args:
            job: the job.
            datasets: the open datasets, in the order of the job's list, with matching fingerprints.
            tables: sized shards, shared by the jobs of a server; by default this planner's own (`table_cache`).

        Raises:
            TokensMissingError: a dataset is not counted for the job's tokenizer; names the command.
            FilterError: a filter does not fit the dataset's columns.
            SampleTooLargeError: a sample cannot fit a sequence, or a module's memory.
            TowerMemoryError: contrastive batches of the largest samples would not fit a tower's memory.
            DatasetEmptyError: nothing is left of a dataset.
            ValueError: samples that the job's modules do not handle, or a step that is too large to plan.
        """
        self.job = job
        self._datasets = tuple(datasets)
        self._filters = [_compile(s, d) for s, d in zip(job.stream.datasets, datasets, strict=True)]
        self._tables = table_cache() if tables is None else tables
        self._limits = layout_of(job.spec.execution).limits(job.spec)
        counts, totals = zip(*(self._measure(d) for d in range(len(datasets))), strict=True)
        self._order = StreamOrder(job.stream, job.spec.execution.end, totals)
        self._order.check_size(counts)
        self._limits.check(self._order.repeats(job.stream.contrastive_batch or 1))
        self._plans = _OnceCache[StepPlan](PLANS_KEPT)

    @property
    def num_steps(self) -> int:
        """Steps until the job ends."""
        return self._order.num_steps

    def plan(self, step: int) -> StepPlan:
        """The plan of one step, computed by the first caller while the others wait.

        Raises:
            StepOutOfRangeError: the job ends before.
        """
        return self._plans.get(step, lambda: plan_step(self.job, step, self.samples(step)))

    def samples(self, step: int) -> StepSamples:
        """The samples of one step in canonical order.

        Raises:
            StepOutOfRangeError: the job ends before.
        """
        return concatenate([self._samples_of(span) for span in self._order.spans(step)])

    def _samples_of(self, span: Span) -> StepSamples:
        tables = [self._table(span.dataset, shard) for shard in span.shards]
        numbers, which, position = self._order.select(span, tables)
        picked = _pick(tables, which, position)
        return size_samples(self.job.stream, span.dataset, span.pass_, numbers, picked)

    def _measure(self, dataset: int) -> tuple[int, I64]:
        """Samples of a dataset, and int64 [shards]: the length of each shard on the dataset's axis."""
        totals = np.zeros(len(self._datasets[dataset].shards), np.int64)
        count = 0
        for shard in range(len(totals)):
            table = self._table(dataset, shard)
            self._limits.add(dataset, table, self._where(dataset, shard))
            totals[shard] = units_of(self.job.stream, table).sum()
            count += len(table.row)
        return count, totals

    def _table(self, dataset: int, shard: int) -> ShardTable:
        return self._tables.get((self.job.stream_id, dataset, shard), lambda: self._load_table(dataset, shard))

    def _load_table(self, dataset: int, shard: int) -> ShardTable:
        spec, opened = self.job.stream.datasets[dataset], self._datasets[dataset]
        source = opened.shards[shard]
        quarantine = opened.quarantine if spec.quarantine else None
        row = np.flatnonzero(source.keep(self._filters[dataset], quarantine))
        sizes = source.sizes()
        tokens = _row_sums(source.token_counts(self.job.stream.tokenizer.digest), sizes.text_offsets)[row]
        counts = np.diff(sizes.image_offsets)[row]
        images = _ranges(sizes.image_offsets[row], counts)
        return shard_table(
            self.job.stream,
            row,
            tokens,
            np.concatenate([[0], np.cumsum(counts)]),
            sizes.image_width[images],
            sizes.image_height[images],
            self._where(dataset, shard),
        )

    def _where(self, dataset: int, shard: int) -> str:
        return f"dataset {self.job.stream.datasets[dataset].name}, shard {self._datasets[dataset].shards[shard].name}"


class _OnceCache(Generic[Value]):
    """The newest values by key; concurrent callers of one key wait for the first one's result."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Value]] = {}

    def get(self, key: int, compute: Callable[[], Value]) -> Value:
        with self._lock:
            future = self._futures.pop(key, None)
            first = future is None
            future = future or Future[Value]()
            self._futures[key] = future  # most recently used last
            if len(self._futures) > self._size:
                del self._futures[next(iter(self._futures))]
        if first:
            try:
                future.set_result(compute())
            except BaseException as error:
                with self._lock:
                    self._futures.pop(key, None)
                future.set_exception(error)
        return future.result()


def table_cache() -> LruCache[ShardTable]:
    """A cache of sized shards; they depend on the stream of a job alone."""
    return LruCache(TABLES_CACHE_BYTES, _table_bytes)


def _compile(spec: DatasetSpec, dataset: Dataset) -> Filter | None:
    if not spec.filter:
        return None
    compiled = compile_filter(spec.filter)
    compiled.check(dataset.shards)
    return compiled


def _row_sums(values: NDArray[Any], offsets: I64) -> I64:
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    totals: I64 = sums[offsets[1:]] - sums[offsets[:-1]]
    return totals


def _ranges(starts: I64, counts: I64) -> I64:
    """Concatenation of arange(start, start + count)."""
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    ranges: I64 = np.repeat(starts, counts) + within
    return ranges


def _pick(tables: Sequence[ShardTable], which: I64, position: I64) -> ShardTable:
    """Rows of several tables, in a given order."""
    bases = np.concatenate([[0], np.cumsum([len(t.row) for t in tables])])
    image_bases = np.concatenate([[0], np.cumsum([len(t.image_rows) for t in tables])])
    at = bases[which] + position
    firsts = np.concatenate([t.image_offsets[:-1] + b for t, b in zip(tables, image_bases, strict=False)])[at]
    counts = np.concatenate([np.diff(t.image_offsets) for t in tables])[at]
    images = _ranges(firsts, counts)
    return ShardTable(
        row=np.concatenate([t.row for t in tables])[at],
        text_tokens=np.concatenate([t.text_tokens for t in tables])[at],
        image_offsets=np.concatenate([[0], np.cumsum(counts)]),
        image_rows=np.concatenate([t.image_rows for t in tables])[images],
        image_columns=np.concatenate([t.image_columns for t in tables])[images],
        nominal=np.concatenate([t.nominal for t in tables])[at],
    )


def _table_bytes(table: ShardTable) -> int:
    arrays = (table.row, table.text_tokens, table.image_offsets, table.image_rows, table.image_columns, table.nominal)
    return sum(a.nbytes for a in arrays)
