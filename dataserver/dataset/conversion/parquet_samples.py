"""The rows of a Parquet file as samples of a tar, read by Arrow: any encoding, compression and size of pages."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from dataserver.dataset.conversion.row_samples import RowSamples
from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import DatasetError, Findings, SampleError, is_of_storage
from dataserver.dataset.machine.memory import usable_memory
from dataserver.dataset.shards.modalities import ENDINGS, IMAGES, Media, media_of
from dataserver.dataset.shards.parquet.footer import EncryptedError
from dataserver.dataset.shards.parquet.format import (
    ENCRYPTED,
    ENCRYPTED_MAGIC,
    UNREADABLE,
    ImageColumn,
    image_columns,
    without_bytes,
)
from dataserver.dataset.shards.parquet.rows import OtherColumns
from dataserver.dataset.shards.parquet.stored import OpenParquet, StoredColumn, open_parquet, string_bytes
from dataserver.dataset.storage.registry import storage_of

BATCH_ROWS: Final = 16
"""Rows whose images are in memory at a time."""
MAX_BATCH_BYTES: Final = 1 << 30
"""About what a batch of rows may have. A page may be larger, up to the 2 GiB that its header can say."""
_COPIES: Final = 3
"""Copies of a page that Arrow has in memory: as stored, decompressed, and as values."""
MAX_LIST_BYTES: Final = 4 << 30
"""Bytes of the lists of images in one row group, decompressed: one row may have them all."""
MAX_LINE_BYTES: Final = 1 << 30
"""Bytes of all images of one row, which are in memory at a time."""


def parquet_samples(path: Path, findings: Findings, media: Media) -> Iterator[Members]:
    """Yield the members of each row, in order.

    Args:
        path: the file.
        findings: where columns and rows are counted that no sample is made of.
        media: whose bytes are looked for in plain columns of bytes.

    Raises:
        DatasetError: it cannot be read to its end.
        OSError: storage failed.
    """
    with storage_of(path).open(path) as file:
        if file.read(len(ENCRYPTED_MAGIC)) == ENCRYPTED_MAGIC:
            raise DatasetError(f"{path}: {ENCRYPTED}")
    try:
        with open_parquet(path) as opened:
            yield from _samples(opened, findings, media)
    except (MemoryError, DatasetError):
        raise
    except UNREADABLE as error:
        if is_of_storage(error):
            raise
        if isinstance(error, EncryptedError):
            raise DatasetError(f"{path}: {error}") from error
        raise DatasetError(f"{path} cannot be read to its end: {error}; copy it again") from error


def _samples(opened: OpenParquet, findings: Findings, media: Media) -> Iterator[Members]:
    parquet = opened.parquet
    columns = with_bytes(image_columns(parquet, media))
    others = OtherColumns(opened, {column.name: column.has_path for column in columns}, findings, None)
    others.check(range(parquet.metadata.num_row_groups))
    images_of = _Images(opened, columns, media)
    samples = RowSamples(columns, findings)
    number = 0
    for group in range(parquet.metadata.num_row_groups):
        num_rows = parquet.metadata.row_group(group).num_rows
        for row, images in zip(others.rows(group, num_rows), images_of.rows(group, num_rows), strict=True):
            yield from samples.of(number, row, images)
            number += 1
    samples.report()


class _Images:
    """Reads the bytes of images, a row group at a time."""

    def __init__(self, opened: OpenParquet, columns: Sequence[ImageColumn], media: Media) -> None:
        """Walk their pages. Raises ValueError where they would take too much memory."""
        self._media = media
        self._missing = {
            number: without_bytes(opened.parquet, column) for number, column in enumerate(columns) if column.leaf < 0
        }
        self._columns = [column for column in columns if column.leaf >= 0]
        leaves = {opened.parquet.schema.column(column.leaf).path: column.leaf for column in self._columns}
        self._paths = list(leaves)
        self._stored = []
        for group in range(opened.parquet.metadata.num_row_groups):
            stored = {column.leaf: opened.column(group, column.leaf) for column in self._columns}
            for column in self._columns:
                _check_stored(column, stored[column.leaf], group)
            self._stored.append(stored)
        self._parquet = opened.keeping_dictionaries(opened.foldable(leaves, self._stored))

    def rows(self, group: int, num_rows: int) -> Iterator[list[list[bytes | SampleError | None]]]:
        """Yield the bytes in each column of images, row by row; why there are none, where a column holds no bytes."""
        for found in self._present(group, num_rows):
            for number, missing in self._missing.items():  # in the order of the columns
                found.insert(number, [missing])
            yield found

    def _present(self, group: int, num_rows: int) -> Iterator[list[list[bytes | SampleError | None]]]:
        if not self._columns:
            yield from ([] for _ in range(num_rows))
            return
        largest = max(column.largest_page for column in self._stored[group].values())
        num = max(1, min(BATCH_ROWS, MAX_BATCH_BYTES // max(largest, 1)))
        for batch in self._parquet.iter_batches(num, row_groups=[group], columns=self._paths, use_threads=False):
            held = [batch.column(batch.schema.get_field_index(column.name)) for column in self._columns]
            sizes = [string_bytes(values).tolist() for values in held]
            for row in range(batch.num_rows):
                yield [
                    image_bytes(values[row], column, size[row], self._media)
                    for values, column, size in zip(held, self._columns, sizes, strict=True)
                ]


def _check_stored(column: ImageColumn, stored: StoredColumn, group: int) -> None:
    """Raise ValueError if a column of images takes too much memory while it is read."""
    where = f"column {column.name[:80]}, row group {group}"
    needed, memory = _COPIES * stored.largest_page, usable_memory()
    if stored.largest_page > MAX_BATCH_BYTES and needed > memory.num_bytes // 2:
        raise ValueError(
            f"{where}: a page of {stored.largest_page} bytes takes {needed} of memory, over half of {memory.whose}, "
            f"{memory.num_bytes}; write smaller ones, or convert it on a larger machine"
        )
    if column.is_list and stored.plain_bytes > MAX_LIST_BYTES:
        raise ValueError(f"{where}: lists of {stored.plain_bytes} bytes, limit {MAX_LIST_BYTES}; write smaller groups")
    if column.is_list and stored.shares_prefixes:
        raise ValueError(f"{where}: lists as DELTA_BYTE_ARRAY, which is not read; write it with column_encoding PLAIN")


def with_bytes(columns: Sequence[ImageColumn]) -> list[ImageColumn]:
    """Leave out columns that are named as those of clips or videos and hold none: these stay entries of `KEY.json`."""
    return [column for column in columns if column.has_bytes or column.ending == IMAGES.ending]


def image_bytes(
    value: pa.Scalar, column: ImageColumn, num_bytes: int, media: Media
) -> list[bytes | SampleError | None]:
    """Return the images, clips or videos of one row, of so many bytes together; None for a null, and for what claims to
    be none."""
    if num_bytes > MAX_LINE_BYTES:
        return [SampleError(ENDINGS[column.ending].too_large, f"{num_bytes} bytes in one row, limit {MAX_LINE_BYTES}")]
    found = value.as_py()
    elements = (found or []) if column.is_list else [found]
    held = [element.get("bytes") if isinstance(element, dict) else element for element in elements]
    return [data if data is None or column.is_image or media_of(data, media) else None for data in held]
