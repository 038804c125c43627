"""Sidecar columns: what the shard's parquet (or else its .json members) says about each sample, as typed columns.

Types are int64, float64, bool and string; a missing value is null, and NaN, which is how pandas writes a missing
float, is null too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataserver.dataset.errors import Oddities
from dataserver.dataset.samples import Scalar

EXCLUDED: Final = frozenset({"key", "caption", "exif"})
"""The key and the caption are columns of their own; exif is a long text that nobody filters by."""

MAX_SIDECAR_BYTES: Final = 1 << 30
MAX_SIDECAR_ROWS: Final = 1 << 22
MAX_COLUMNS: Final = 256
MAX_COLUMN_NAME_CHARS: Final = 128

KEY: Final = "key"
INT64_RANGE: Final = range(-(1 << 63), 1 << 63)


def read_sidecar(path: Path, keys: Sequence[str], scalars: Sequence[dict[str, Scalar]], oddities: Oddities) -> pa.Table:
    """Return the sidecar columns of a shard, one row per key, sorted by column name.

    Args:
        path: the shard's parquet; where it does not exist or cannot be used (an oddity), `scalars` are taken.
        keys: sample keys in row order.
        scalars: per sample, the scalar entries of its .json.
        oddities: where an unusable parquet and columns beyond `MAX_COLUMNS` are counted.
    """
    columns: dict[str, pa.Array] | None = None
    if path.exists():
        try:
            columns = _parquet_columns(path, keys)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # storage failed; a damaged parquet has no errno
            oddities.add("", "bad_sidecar", f"{path.name}: {error}")
    if columns is None:
        columns = _json_columns(scalars)
    names = sorted(columns)
    if len(names) > MAX_COLUMNS:
        oddities.add("", "too_many_columns", f"{len(names)} sidecar columns, the first {MAX_COLUMNS} are kept")
    kept = names[:MAX_COLUMNS]
    return pa.table([columns[name] for name in kept], names=kept)


def _usable_name(name: str) -> bool:
    return name not in EXCLUDED and 0 < len(name) <= MAX_COLUMN_NAME_CHARS and name.isprintable()


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
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.string()
    return None


def _parquet_columns(path: Path, keys: Sequence[str]) -> dict[str, pa.Array]:
    """Read the scalar columns of a parquet and join them with `keys`; of a repeated key the first row counts."""
    size = path.stat().st_size
    if size > MAX_SIDECAR_BYTES:
        raise ValueError(f"{size} bytes, limit {MAX_SIDECAR_BYTES}")
    with pq.ParquetFile(path) as file:
        if file.metadata.num_rows > MAX_SIDECAR_ROWS:
            raise ValueError(f"{file.metadata.num_rows} rows, limit {MAX_SIDECAR_ROWS}")
        schema = file.schema_arrow
        if schema.names.count(KEY) != 1 or _target_type(schema.field(KEY).type) != pa.string():
            raise ValueError("needs one string column 'key'")
        names = [n for n in schema.names if schema.names.count(n) == 1 and _usable_name(n)]
        names = [n for n in names if _target_type(schema.field(n).type) is not None]
        table = file.read(columns=[KEY, *names], use_threads=False)
    rows: dict[str, int] = {}
    for row, key in enumerate(table.column(KEY).to_pylist()):
        rows.setdefault(key, row)
    taken = pa.array([rows.get(key) for key in keys], pa.int64())
    return {n: _cast(table.column(n), _target_type(schema.field(n).type)).take(taken) for n in names}


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    cast = column.cast(kind).combine_chunks()
    cast.validate(full=True)  # a parquet may hold strings that are not UTF-8
    return _nan_to_null(cast) if kind == pa.float64() else cast


def _nan_to_null(array: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_nan(array), pa.scalar(None, pa.float64()), array)


def _json_columns(scalars: Sequence[dict[str, Scalar]]) -> dict[str, pa.Array]:
    """Make columns of the union of all entries; mixed types become strings of JSON."""
    names = sorted({name for row in scalars for name in row if _usable_name(name)})
    return {name: _json_column([row.get(name) for row in scalars]) for name in names}


def _json_column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    big = any(type(value) is int and value not in INT64_RANGE for value in values)
    if kinds <= {bool}:
        return pa.array(values, pa.bool_())
    if kinds <= {int} and not big:
        return pa.array(values, pa.int64())
    if kinds <= {int, float} and not big:
        return _nan_to_null(pa.array([None if v is None else float(v) for v in values], pa.float64()))
    texts = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
    return pa.array(texts, pa.string())
