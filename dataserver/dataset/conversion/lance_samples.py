"""The rows of a Lance dataset as samples of a tar, read by Lance's own reader (`pip install pylance`).

A fragment is a source of its own, so that several are converted at once. The reader follows what a dataset says of
where its files lie, and takes the memory that its pages take: so the docs want datasets that are trusted.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dataserver.dataset.conversion.parquet_samples import image_bytes, with_bytes
from dataserver.dataset.conversion.row_samples import RowSamples
from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import DatasetError, Findings, SampleError, is_of_storage
from dataserver.dataset.shards.modalities import Media
from dataserver.dataset.shards.parquet.format import ImageColumn, image_columns_of
from dataserver.dataset.shards.parquet.rows import RowColumns
from dataserver.dataset.shards.parquet.stored import string_bytes
from dataserver.dataset.storage.registry import storage_of

BATCH_ROWS: Final = 16
"""Rows in memory at a time."""
_ERRORS: Final = (OSError, ValueError, RuntimeError, pa.ArrowException)
"""What Lance raises; its errors of storage have no number."""


def lance_fragments(source: Path, folder: str) -> Iterator[tuple[str, int, str, int]]:
    """Yield what is known of each fragment: manifest relative to the source, number, `details`, about how many bytes.

    Args:
        source: what is converted.
        folder: of the dataset below it, with a slash at its end; empty where it is the source.

    Raises:
        DatasetError: Lance is not installed, or cannot open the dataset.
    """
    path = source / folder
    if not storage_of(source).is_local:
        raise DatasetError(f"{path} is a Lance dataset, which is read from disks alone; copy it to one")
    lance = _lance()
    try:
        dataset = lance.dataset(str(path))
        version = dataset.version
        fragments = [(one.fragment_id, [file.file_size_bytes for file in one.data_files()]) for one in _all(dataset)]
    except _ERRORS as error:
        raise DatasetError(f"{path} cannot be opened as a Lance dataset: {_first_line(error)}") from error
    manifest = _manifest(path, version)
    for number, sizes in fragments:
        details = json.dumps({"folder": folder, "version": version, "fragment": number})
        yield f"{folder}_versions/{manifest}", number, details, sum(size or 0 for size in sizes)


def lance_samples(source: Path, details: str, findings: Findings, media: Media) -> Iterator[Members]:
    """Yield the members of each row of a fragment, in order.

    Args:
        source: what is converted.
        details: as `lance_fragments` gave them.
        findings: where columns and rows are counted that no sample is made of.
        media: as of `parquet_samples`.

    Raises:
        DatasetError: it cannot be read to its end.
    """
    held = json.loads(details)
    path = source / held["folder"]
    try:
        dataset = _lance().dataset(str(path), version=held["version"])
        fragment = next(one for one in _all(dataset) if one.fragment_id == held["fragment"])
        yield from _samples(dataset, fragment, findings, media)
    except DatasetError:
        raise
    except _ERRORS as error:
        if is_of_storage(error):
            raise
        number = held["fragment"]
        raise DatasetError(f"{path}, fragment {number}: cannot be read to its end: {_first_line(error)}") from error


def _samples(dataset: Any, fragment: Any, findings: Findings, media: Media) -> Iterator[Members]:
    scanner = dataset.scanner(
        fragments=[fragment],
        batch_size=BATCH_ROWS,
        batch_readahead=1,
        fragment_readahead=1,
        scan_in_order=True,
        blob_handling="all_binary",
    )
    columns = with_bytes(image_columns_of(scanner.projected_schema, media))
    rows = RowColumns(scanner.projected_schema, {column.name: column.has_path for column in columns}, findings, None)
    samples = RowSamples(columns, findings)
    number = 0
    for batch in scanner.to_batches():
        images = [_images(batch, column, media) for column in columns]
        for row, *of_row in zip(rows.rows(_without_bytes(batch, columns)), *images, strict=True):
            yield from samples.of(number, row, of_row)
            number += 1
    if number != fragment.count_rows():
        raise ValueError(f"{number} rows, {fragment.count_rows()} were declared")
    samples.report()


def _images(batch: pa.RecordBatch, column: ImageColumn, media: Media) -> list[list[bytes | SampleError | None]]:
    """The images in one column of each row."""
    values = batch.column(batch.schema.get_field_index(column.name))
    if not column.has_bytes:
        detail = f"column {column.name} holds no bytes, it is of type {str(values.type)[:80]}"
        return [[SampleError("missing_image", detail)]] * batch.num_rows
    sizes = string_bytes(values).tolist()
    return [image_bytes(value, column, size, media) for value, size in zip(values, sizes, strict=True)]


def _without_bytes(batch: pa.RecordBatch, columns: list[ImageColumn]) -> pa.RecordBatch:
    """A batch without the bytes of its images; of a structure with a path, that stays."""
    found = {name: batch.column(n) for n, name in enumerate(batch.schema.names)}
    for column in columns:
        values = found.pop(column.name)
        if column.has_path and not column.is_list:
            found[column.name] = pa.StructArray.from_arrays([values.field("path")], ["path"])
    return pa.RecordBatch.from_arrays([*found.values()], [*found]) if found else batch.select([])


def _all(dataset: Any) -> list[Any]:
    return sorted(dataset.get_fragments(), key=lambda fragment: fragment.fragment_id)


def _manifest(path: Path, version: int) -> str:
    """The name of the file that describes a version."""
    names = (f"{version}.manifest", f"{(1 << 64) - 1 - version}.manifest")
    found = next((name for name in names if (path / "_versions" / name).is_file()), None)
    if found is None:
        raise DatasetError(f"{path} has no manifest of its version {version} in _versions; copy the dataset again")
    return found


def _lance() -> Any:
    try:
        return importlib.import_module("lance")
    except ImportError as error:
        raise DatasetError(f"Lance datasets are read with pylance ({error}): pip install '.[lance]'") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
