"""The columns of a shard's parquet: read one after the other, joined with its samples by key, cast to stored types."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataserver.dataset.errors import Oddities
from dataserver.dataset.kinds import UNUSABLE_COLUMN
from dataserver.dataset.sidecar_columns import (
    EXCLUDED,
    INT64_RANGE,
    nan_to_null,
    refusing,
    report_misfits,
    usable_names,
)
from dataserver.dataset.stamps import check_regular

MAX_SIDECAR_BYTES: Final = 1 << 30
MAX_SIDECAR_ROWS: Final = 1 << 22
MAX_SIDECAR_VALUE_BYTES: Final = 1 << 29
"""Limit of the decoded columns: a few encoded bytes of a parquet can repeat a long string very often."""

READ_ROWS: Final = 256
"""Rows decoded at a time, between checks of the limit."""

KEY: Final = "key"


def parquet_columns(path: Path, keys: Sequence[str], oddities: Oddities) -> dict[str, pa.Array]:
    """Read the scalar columns of a parquet and join them with `keys`; of a repeated key the first row counts.

    Columns that cannot be used, and values that do not fit, are counted in `oddities`.

    Raises:
        ValueError, ArrowException, OSError: the parquet cannot be used at all, or storage failed (with an errno).
    """
    check_regular(path)
    size = path.stat().st_size
    if size > MAX_SIDECAR_BYTES:
        raise ValueError(f"{size} bytes, limit {MAX_SIDECAR_BYTES}")
    columns: dict[str, pa.Array] = {}
    with pq.ParquetFile(path) as file:
        if file.metadata.num_rows > MAX_SIDECAR_ROWS:
            raise ValueError(f"{file.metadata.num_rows} rows, limit {MAX_SIDECAR_ROWS}")
        kinds = {field.name: _target_type(field.type) for field in file.schema_arrow}
        if len(kinds) != len(file.schema_arrow) or kinds.get(KEY) != pa.string():
            raise ValueError("needs one string column 'key' and no repeated names")
        names = usable_names(_scalar_names(file.schema_arrow, oddities), oddities)
        left = MAX_SIDECAR_VALUE_BYTES
        known = _checked(_read(file, KEY, pa.string(), left))
        left -= known.nbytes
        rows = pc.index_in(pa.array(keys, pa.string()), value_set=known)
        for name in names:
            with refusing(UNUSABLE_COLUMN, name, oddities):
                is_integer = pa.types.is_integer(file.schema_arrow.field(name).type)  # which may be too large a one
                column = _read(file, name, None if is_integer else kinds[name], left)
                left -= column.nbytes
                taken = _checked(column.take(rows).combine_chunks())
                columns[name] = _fitted(name, taken, kinds[name], keys, oddities)
    return columns


def _scalar_names(schema: pa.Schema, oddities: Oddities) -> list[str]:
    """The columns whose values a filter can compare."""
    names = []
    for field in schema:
        if _target_type(field.type) is not None:
            names.append(field.name)
        elif field.name not in EXCLUDED and not pa.types.is_null(field.type):  # pandas writes no values as nulls
            need = "filters compare numbers, strings and booleans"
            oddities.add("", UNUSABLE_COLUMN, f"{field.name[:40]}: its values are {field.type}; {need}")
    return names


def _target_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type a column is stored as; None for columns that are left out."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return pa.bool_()
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    return None


def _read(file: pq.ParquetFile, name: str, kind: pa.DataType | None, max_bytes: int) -> pa.ChunkedArray:
    """Read one column, batch by batch, and cast it to a type, or leave it as it is.

    Raises:
        ValueError: its values take more than `max_bytes`.
    """
    parts = []
    left = max_bytes
    for batch in file.iter_batches(READ_ROWS, columns=[name], use_threads=False):
        column = batch.column(name) if kind is None else batch.column(name).cast(kind)
        left -= column.nbytes
        if left < 0:
            raise ValueError(f"more than {MAX_SIDECAR_VALUE_BYTES} bytes of values")
        parts.append(column)
    return pa.chunked_array(parts, file.schema_arrow.field(name).type if kind is None else kind)


def _checked(values: pa.Array) -> pa.Array:
    values.validate(full=True)  # a parquet may hold strings that are not UTF-8
    return values


def _fitted(name: str, values: pa.Array, kind: pa.DataType, keys: Sequence[str], oddities: Oddities) -> pa.Array:
    """Cast to a stored type; what does not fit is null."""
    fitting = values
    if pa.types.is_uint64(values.type):
        large = pc.greater(values, pa.scalar(INT64_RANGE[-1], pa.uint64()))
        fitting = pc.if_else(large, pa.scalar(None, pa.uint64()), values)
    kept = fitting.cast(kind)
    if kept.null_count > values.null_count:
        report_misfits(name, values.to_pylist(), kept, keys, oddities)
    return nan_to_null(kept)
