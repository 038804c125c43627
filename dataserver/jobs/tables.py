"""Sized tables of the shards of a job's datasets, made when they are asked for."""

from collections.abc import Sequence

import numpy as np

from dataserver.dataset import Dataset, Filter, FilterError, compile_filter
from dataserver.jobs.kept import Kept
from dataserver.planning.gathering import ShardColumns, size_rows
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import DatasetSpec
from dataserver.planning.samples import ShardTable


class ShardTables:
    """The samples of each shard that filter and quarantine leave, with their sizes. Thread-safe."""

    def __init__(self, job: Job, datasets: Sequence[Dataset], kept: Kept) -> None:
        """Compile the filters.

        Raises:
            FilterError: a filter does not fit the dataset's columns.
        """
        self._stream_id, self._stream = job.stream_id, job.stream
        self._datasets = datasets
        self._filters = [_compile(s, d) for s, d in zip(job.stream.datasets, datasets, strict=True)]
        self._kept = kept

    def num_shards(self, dataset: int) -> int:
        """Shards of a dataset."""
        return len(self._datasets[dataset].shards)

    def table(self, dataset: int, shard: int) -> ShardTable:
        """The sized samples of a shard.

        Raises:
            TokensMissingError: the shard is not counted for the job's tokenizer; names the command.
            SampleTooLargeError: a sample cannot fit a sequence.
        """
        return self._kept.tables.get((self._stream_id, dataset, shard), lambda: self._load(dataset, shard))

    def where(self, dataset: int, shard: int) -> str:
        """Names a shard in messages."""
        return f"dataset {self._stream.datasets[dataset].name}, shard {self._datasets[dataset].shards[shard].name}"

    def _load(self, dataset: int, shard: int) -> ShardTable:
        opened = self._datasets[dataset]
        source = opened.shards[shard]
        quarantine = opened.quarantine if self._stream.datasets[dataset].quarantine else None
        row = np.flatnonzero(source.keep(self._filters[dataset], quarantine))
        sizes = source.sizes()
        columns = ShardColumns(
            text_offsets=sizes.text_offsets,
            text_tokens=source.token_counts(self._stream.tokenizer.digest),
            image_offsets=sizes.image_offsets,
            image_width=sizes.image_width,
            image_height=sizes.image_height,
        )
        return size_rows(self._stream, columns, row, self.where(dataset, shard))


def _compile(spec: DatasetSpec, dataset: Dataset) -> Filter | None:
    if not spec.filter:
        return None
    try:
        compiled = compile_filter(spec.filter)
        compiled.check(dataset.shards)
    except FilterError as error:
        raise FilterError(f"dataset {spec.name}: {error}") from error
    return compiled
