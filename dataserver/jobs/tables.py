"""Sized tables of the shards of a job's datasets, made when they are asked for."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from dataserver.dataset import Dataset, DatasetError, Filter, FilterError, compile_filter
from dataserver.jobs.cache import JobCache
from dataserver.jobs.catalog import metadata_keys
from dataserver.jobs.memory_usage import memory_of
from dataserver.jobs.shard_statistics import Rules, columns_of, rows_left
from dataserver.planning import I64, Bool
from dataserver.planning.job.fields import DatasetSpec, Stream
from dataserver.planning.stream.axis import Rest
from dataserver.planning.stream.captions import Captions
from dataserver.planning.stream.chats import fit_chats
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.continuation import Seen, division_of
from dataserver.planning.stream.documents import Split
from dataserver.planning.stream.gathering import Window, gather_window, size_rows
from dataserver.planning.stream.samples import ShardTable
from dataserver.planning.stream.slices import Slices, Table, cut, gather_slice, whole
from dataserver.planning.stream.targets import DocumentTargets
from dataserver.planning.stream.windows import Span, WindowOrder, units_of

CACHED_SLICES: Final = 4
"""Slices of a window that is too large to be cached: so many fit the cache of windows."""

_log = logging.getLogger(__name__)


class LongChats(NamedTuple):
    """The k conversations of a shard that are longer than a sequence."""

    row: I64
    """Rows of the index, int64 [k]."""
    tokens: I64
    """int64 [k]: of each as a whole."""
    is_cut: Bool
    """bool [k]: whether it is cut behind an answer; else it is left out."""


class ShardTables:
    """The samples of each shard that filter and quarantine leave, with their sizes. Thread-safe."""

    def __init__(
        self,
        stream_id: str,
        stream: Stream,
        datasets: Sequence[Dataset],
        cache: JobCache,
        seen: Sequence[Seen | None] | None = None,
    ) -> None:
        """Compile the filters.

        Args:
            stream_id: tells the tables of streams apart.
            stream: of a job.
            datasets: the open datasets, in the order of the stream.
            cache: where tables are kept.
            seen: what earlier streams have had of each dataset.

        Raises:
            FilterError: a filter does not fit the dataset's columns.
            CaptionError: a dataset has no sample with a caption that the job names.
        """
        for spec, dataset in zip(stream.datasets, datasets, strict=True):
            dataset.check_captions(Captions.of(spec).names)
        self._stream_id, self.stream = stream_id, stream
        self._datasets = datasets
        self.seen = [None] * len(datasets) if seen is None else seen
        self._rules = [rules_of(stream, *of) for of in zip(stream.datasets, datasets, strict=True)]
        self._filters = list(map(_compile, stream.datasets, datasets, self._rules))
        self._cache = cache
        self._warned = False

    def names(self, dataset: int) -> list[str]:
        """Names of the shards of a dataset."""
        return [shard.name for shard in self._datasets[dataset].shards]

    def key(self, dataset: int, shard: int, row: int) -> str:
        """Return the key of a sample."""
        return self._datasets[dataset].shards[shard].keys()[row]

    def may_have_others(self, dataset: int) -> Bool:
        """Which shards of a dataset may have clips or videos. bool [shards]."""
        return np.array(
            [shard.may_have_audio or shard.may_have_videos for shard in self._datasets[dataset].shards], np.bool_
        )

    def are_chats(self, dataset: int) -> bool:
        """Whether the samples of a dataset are conversations."""
        return Captions.of(self.stream.datasets[dataset]).are_chats

    def table(self, dataset: int, shard: int) -> ShardTable:
        """The sized samples of a shard.

        Raises:
            TokensMissingError: the shard is not counted for the job's tokenizer; names the command.
            SampleTooLargeError: a sample cannot fit a sequence.
        """
        return self._cache.tables.get((self._stream_id, dataset, shard), lambda: self._load(dataset, shard))

    def left(self, dataset: int, shard: int, epoch: int) -> ShardTable:
        """The sized samples of a shard that an epoch has; of the first one those that earlier streams left."""
        found, seen = self.table(dataset, shard), self.seen[dataset]
        if seen is None or seen.epoch != epoch:
            return found
        division = division_of(self.stream, self.stream.datasets[dataset])
        return seen.left(self._datasets[dataset].shards[shard].name, found, division)

    def windows(self, order: WindowOrder, span: Span, lengths: I64) -> Iterator[Window]:
        """The shuffle window in which a span lies, or those slices of it; all steps are cut from the same ones.

        Args:
            order: of the stream.
            span: of a step.
            lengths: int64 [shards] of the dataset, on its axis in the epoch of the span.

        Raises:
            TokensMissingError, SampleTooLargeError: as for `table`.
            DatasetError: the axis was laid out with another length of one of its shards.
        """

        def table(shard: int) -> ShardTable:
            found = self.left(span.dataset, shard, span.epoch)
            length, expected = int(units_of(order.stream, found).sum()), int(lengths[shard])
            if length != expected:
                raise DatasetError(
                    f"{self.where(span.dataset, shard)}: its samples take {length} units of the axis, and its "
                    f"statistics say {expected}, so that steps would begin elsewhere than on other servers: empty the "
                    "folder that --cache-dir names, remove disttrain.statistics-* beside the index, and restart the "
                    "server"
                )
            return found

        key = self._stream_id, span.dataset, span.epoch, span.number
        slices = self._cache.cuts.get(key, lambda: self._cut(order, span, table))
        for number in slices.of(span):
            yield self._cache.windows.get((*key, number), partial(_gathered, order, span, table, slices, number))

    def _cut(self, order: WindowOrder, span: Span, table: Table) -> Slices:
        """One slice where the window can be cached, else several; a few of these can be cached together.

        A window takes at most half as much again as the tables of its shards. One that slides is gathered by slots,
        which are small.
        """
        if span.sliding is not None:
            return whole(span)
        most, taken = self._cache.window_bytes, 0
        for shard in span.shards:
            taken += memory_of(table(shard))
            if taken > most * 2 // 3:
                break
        else:
            return whole(span)
        slices = cut(order, span, table, max(1, most // CACHED_SLICES))
        if len(slices) > 1 and not self._warned:
            self._warned = True
            _log.warning(
                "a window of %d shards takes more than the %d bytes of the cache of windows, and is sorted in %d "
                "slices, each from all its shards: lower stream.shuffle_window (now %d) in new "
                "jobs, or raise the server's job_bytes",
                *(len(span.shards), most, len(slices), self.stream.shuffle_window),
            )
        return slices

    def where(self, dataset: int, shard: int) -> str:
        """Names a shard in messages."""
        return f"dataset {self.stream.datasets[dataset].name}, shard {self._datasets[dataset].shards[shard].name}"

    def long_chats(self, dataset: int, shard: int) -> LongChats:
        """The conversations of a shard that filter and quarantine leave, and that are longer than a sequence.

        Raises:
            TokensMissingError: the shard is not rendered by the job's template; names the command.
        """
        row, columns, rules = self._rows(dataset, shard)
        fitted = fit_chats(self.stream.sizing, self.stream.seq_len, columns, cut_at_turn=rules.captions.cut_at_turn)
        row = row[fitted.lengths[row] > self.stream.seq_len]
        return LongChats(row, fitted.lengths[row], fitted.fits[row])

    def _load(self, dataset: int, shard: int) -> ShardTable:
        row, columns, rules = self._rows(dataset, shard)
        return size_rows(self.stream, columns, row, self.where(dataset, shard), rules.captions, rules.split)

    def _rows(self, dataset: int, shard: int) -> tuple[I64, ShardColumns, Rules]:
        """The rows of a shard that are left, what its index says of all, and the rules of its dataset."""
        source, rules = self._datasets[dataset].shards[shard], self._rules[dataset]
        return rows_left(source, self._filters[dataset], rules), columns_of(source, rules), rules


def rules_of(stream: Stream, spec: DatasetSpec, dataset: Dataset) -> Rules:
    """What the statistics of a dataset of a stream depend on."""
    quarantine = dataset.quarantine if spec.quarantine else None
    about = stream.tokenizer.digest, stream.sizing, spec.filter, quarantine, Captions.of(spec)
    made = Split.of(stream, spec), DocumentTargets.of(stream)
    return Rules(*about, metadata=metadata_keys(spec), split=made[0], of_documents=made[1])


def rest_of(tables: ShardTables, dataset: int, lengths: I64) -> Rest | None:
    """What earlier streams left of the epoch that a dataset is in; None where there were none.

    Args:
        tables: of the stream.
        dataset: position in its list.
        lengths: int64 [shards], on the dataset's axis in whole epochs.
    """
    seen = tables.seen[dataset]
    if seen is None:
        return None
    rest = lengths.copy()
    for shard, name in enumerate(tables.names(dataset)):
        if name in seen.shards:
            rest[shard] = 0
        elif name in seen.begun:
            rest[shard] = units_of(tables.stream, tables.left(dataset, shard, seen.epoch)).sum()
    return Rest(seen.epoch, rest)


def _gathered(order: WindowOrder, span: Span, table: Table, slices: Slices, number: int) -> Window:
    """A slice of the window of a span, or the whole of it where there is only one."""
    if len(slices) > 1:
        return gather_slice(order, span, table, slices, number)
    return gather_window(order, span, map(table, span.shards))


def _compile(spec: DatasetSpec, dataset: Dataset, rules: Rules) -> Filter | None:
    if not rules.filter:
        return None
    try:
        compiled = compile_filter(rules.filter)
        # Each shard's own is checked again when it is used; files that transforms left are not all opened for that.
        compiled.check([dataset.shards[0].derived(rules.metadata)] if rules.metadata else dataset.shards)
    except FilterError as error:
        raise FilterError(f"dataset {spec.name}: {error}") from error
    return compiled
