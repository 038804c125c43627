"""The rows of a Parquet file as samples of a tar, read by Arrow: any encoding, compression and size of pages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from dataserver.dataset.conversion.tar_samples import tar_key, tar_sample
from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import DatasetError, Findings
from dataserver.dataset.shards.parquet.format import BUFFER_BYTES, UNREADABLE, ImageColumn, image_columns
from dataserver.dataset.shards.parquet.rows import OtherColumns, row_members
from dataserver.dataset.storage.registry import storage_of
from dataserver.images import sniff_format

BATCH_ROWS: Final = 16
"""Rows whose images are in memory at a time."""


def parquet_samples(path: Path, findings: Findings) -> Iterator[Members]:
    """Yield the members of each row, in order.

    Args:
        path: the file.
        findings: where columns and rows are counted that no sample is made of.

    Raises:
        DatasetError: it cannot be read to its end.
        OSError: storage failed.
    """
    try:
        with storage_of(path).open(path) as file:
            source = pa.PythonFile(file, "r")
            with pq.ParquetFile(source, pre_buffer=False, buffer_size=BUFFER_BYTES) as parquet:
                yield from _samples(parquet, findings)
    except (MemoryError, DatasetError):
        raise
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DatasetError(f"{path} cannot be read to its end: {error}; copy it again") from error


def _samples(parquet: pq.ParquetFile, findings: Findings) -> Iterator[Members]:
    columns = [column for column in image_columns(parquet) if column.leaf >= 0]
    others = OtherColumns(parquet, {column.name: column.has_path for column in columns}, findings)
    leaves = [parquet.schema.column(column.leaf).path for column in columns]
    keys: set[str] = set()
    number = 0
    for group in range(parquet.metadata.num_row_groups):
        num_rows = parquet.metadata.row_group(group).num_rows
        rows = zip(others.rows(group, num_rows), _images(parquet, group, num_rows, columns, leaves), strict=True)
        for other, images in rows:
            row = other._replace(key=tar_key(other.key))
            if sample := tar_sample([*row_members(number, row, columns, images, keys, findings)], findings):
                yield sample
            number += 1


def _images(
    parquet: pq.ParquetFile, group: int, num_rows: int, columns: list[ImageColumn], leaves: list[str]
) -> Iterator[list[list[bytes | None]]]:
    """Yield the bytes in each column of images, row by row."""
    if not columns:
        yield from ([] for _ in range(num_rows))
        return
    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=leaves, use_threads=False):
        held = [batch.column(batch.schema.get_field_index(column.name)) for column in columns]
        for row in range(batch.num_rows):
            yield [_bytes(values[row].as_py(), column) for values, column in zip(held, columns, strict=True)]


def _bytes(value: Any, column: ImageColumn) -> list[bytes | None]:
    elements = (value or []) if column.is_list else [value]
    found = [element.get("bytes") if isinstance(element, dict) else element for element in elements]
    return [data if data is None or column.is_image or sniff_format(data) else None for data in found]
