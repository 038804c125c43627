"""What an index says of single samples, for people: shard, key, and the sidecar's columns."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dataserver.dataset.dataset import Dataset
from dataserver.dataset.index.format import BATCH_ROWS, META_PREFIX, read_batch
from dataserver.dataset.shard import Shard
from dataserver.dataset.shards.parts import Scalar


@dataclass(frozen=True, slots=True)
class SampleDescription:
    """What a sample holds, for people."""

    shard: str
    """File name of the shard."""
    key: str
    columns: dict[str, Scalar]
    """The sidecar columns that have a value for it, by name."""


def describe(dataset: Dataset, places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, SampleDescription]]:
    """Yield what the index says of samples, each with its position in `places`; no shard is touched.

    They come by record batches, each read once, so that a caller may stop at any size.

    Args:
        dataset: an open dataset.
        places: (position of the shard in `dataset.shards`, row) of each sample.

    Raises:
        IndexError: there is no such shard or row; names the place.
        StaleIndexError: an index cannot be read any more.
    """
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n, (shard, row) in enumerate(places):
        if not 0 <= shard < len(dataset.shards):
            raise IndexError(f"the dataset has {len(dataset.shards)} shards, shard {shard} was asked for")
        dataset.shards[shard].check_row(row)
        batches[shard, row // BATCH_ROWS].append(n)
    for (shard, batch), numbers in batches.items():
        rows = [places[n][1] % BATCH_ROWS for n in numbers]
        yield from zip(numbers, _describe(dataset.shards[shard], batch, rows), strict=True)


def _describe(shard: Shard, number: int, rows: list[int]) -> list[SampleDescription]:
    """Describe rows of one record batch."""
    names = [META_PREFIX + name for name in shard.sidecar_columns]
    batch = read_batch(shard.file.index_path, shard.header, number, ["key", *names]).take(rows)
    return [
        SampleDescription(
            shard=shard.name,
            key=row.pop("key"),
            columns={name.removeprefix(META_PREFIX): value for name, value in row.items() if value is not None},
        )
        for row in batch.to_pylist()
    ]
