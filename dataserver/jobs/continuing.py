"""What the streams that a job continues have had of its datasets, found from their own order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.dataset import Dataset
from dataserver.jobs.cache import JobCache
from dataserver.jobs.catalog import dataset_of
from dataserver.jobs.errors import DatasetMismatchError
from dataserver.jobs.scheduler import IsCancelled
from dataserver.jobs.tables import ShardTables, rest_of, rules_of
from dataserver.planning import I64, yield_point
from dataserver.planning.job.fields import Stream
from dataserver.planning.job.identity import hash_of
from dataserver.planning.stream.axis import Axis
from dataserver.planning.stream.continuation import Seen, StepEnd, division_of, last_step_of, seen_before
from dataserver.planning.stream.gathering import Window
from dataserver.planning.stream.statistics import ShardStatistics, axis_lengths
from dataserver.planning.stream.windows import Span, WindowOrder, units_of


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A stream that ended, with those of its datasets that the job has as well."""

    key: str
    """Tells its tables from those of others."""
    stream: Stream
    """The stream with these datasets alone, as if it continued none."""
    datasets: Sequence[Dataset]
    ends: Sequence[StepEnd]
    """Where its last step ends on the axis of each."""
    statistics: Sequence[ShardStatistics]


class EarlierStreams:
    """The streams that a job continues, over the datasets that it shares with them."""

    def __init__(
        self, stream: Stream, datasets: Sequence[Dataset], cache: JobCache, cancelled: IsCancelled, patience_s: float
    ) -> None:
        """Open the datasets as they were, and load statistics; raises as `JobPlanner`."""
        opened = {spec.name: dataset for spec, dataset in zip(stream.datasets, datasets, strict=True)}
        self._cache, self._names = cache, list(opened)
        self._streams = []
        self.notes: list[str] = []
        """What people should know of how the streams end, after `seen`."""
        for continuation in stream.earlier():
            earlier, step = continuation.stream, continuation.step
            ends = zip(earlier.datasets, last_step_of(continuation), strict=True)
            shared = [(spec, end) for spec, end in ends if spec.name in opened]
            specs = tuple(spec for spec, _ in shared)
            alone = earlier.model_copy(update={"datasets": specs, "continues": None})
            try:
                found = [dataset_of(spec, opened[spec.name], earlier.tokenizer.digest) for spec in specs]
            except DatasetMismatchError as error:
                raise DatasetMismatchError(f"the stream that ends with step {step - 1} (continues): {error}") from error
            statistics = [
                cache.statistics.get(dataset, rules_of(alone, spec, dataset), cancelled, patience_s)
                for spec, dataset in zip(specs, found, strict=True)
            ]
            key = f"{hash_of(earlier)}/{hash_of(alone)}"
            self._streams.append(_Earlier(key, alone, found, [end for _, end in shared], statistics))

    def seen(self) -> list[Seen | None]:
        """What of each dataset of the job was had before it begins; None of those that are new."""
        seen: dict[str, Seen] = {}
        for earlier in self._streams:
            self._add(earlier, seen)
        return [seen.get(name) for name in self._names]

    def _add(self, earlier: _Earlier, seen: dict[str, Seen]) -> None:
        """Add what an earlier stream has seen."""
        stream = earlier.stream
        names = [spec.name for spec in stream.datasets]
        before = [seen.get(name) for name in names]
        tables = ShardTables(earlier.key, stream, earlier.datasets, self._cache, before)
        order = WindowOrder(stream)
        for number, (name, end) in enumerate(zip(names, earlier.ends, strict=True)):
            lengths = _lengths(stream, tables, number, earlier.statistics[number])
            axis = Axis(stream, number, lengths, rest_of(tables, number, lengths))

            def windows(span: Span, axis: Axis = axis) -> Iterator[Window]:
                return tables.windows(order, span, axis.totals_in(span.epoch))

            if end.epochs is None and (epochs := end.epochs_within(axis)):
                self.notes.append(
                    f"dataset {name!r}: the last step of a stream that this one continues runs over the end of epoch "
                    f"{epochs - 1}. If its job ended there (end.epochs: {epochs}), state "
                    f"stream.continues.epochs: {epochs}; else samples that the step left out are not read in this epoch"
                )
            division = division_of(stream, stream.datasets[number])
            unit, shards = end.on(axis, name), tables.names(number)
            seen[name] = seen_before(axis, unit, shards, windows, before[number], division)


def _lengths(stream: Stream, tables: ShardTables, dataset: int, statistics: ShardStatistics) -> I64:
    """The length of each shard on its dataset's axis, int64 [shards]."""
    lengths, certain = axis_lengths(stream, statistics, tables.are_chats(dataset))
    for shard in np.flatnonzero(~certain).tolist():
        yield_point()
        lengths[shard] = units_of(stream, tables.table(dataset, shard)).sum()
    return lengths
