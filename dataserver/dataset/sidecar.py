"""Sidecar columns: what the shard's parquet (or else its .json members) says about each sample, as typed columns.

Types are int64, float64, bool and string; a missing value is null, and NaN, which is how pandas writes a missing
float, is null too.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataserver.dataset.errors import Oddities
from dataserver.dataset.samples import Scalar
from dataserver.dataset.stamps import check_regular

EXCLUDED: Final = frozenset({"key", "caption", "exif"})
"""The key and the caption are columns of their own; exif is a long text that nobody filters by."""

MAX_SIDECAR_BYTES: Final = 1 << 30
MAX_SIDECAR_ROWS: Final = 1 << 22
MAX_SIDECAR_VALUE_BYTES: Final = 1 << 29
"""Limit of the decoded columns: a few encoded bytes of a parquet can repeat a long string very often."""

READ_ROWS: Final = 256
"""Rows decoded at a time, between checks of the limit."""

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
            columns = _parquet_columns(path, keys, oddities)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # storage failed; a damaged parquet has no errno, nor has what is no regular file
            oddities.add("", "bad_sidecar", f"{path.name}: {error}")
    if columns is None:
        columns = _json_columns(scalars, oddities)
    return pa.table(list(columns.values()), names=list(columns))


def promised_images(
    rows: Sequence[int], columns: pa.Table, scalars: Sequence[dict[str, Scalar]]
) -> Iterator[tuple[int, str]]:
    """Yield those of `rows` whose sidecar or .json gives the size of an image, with that size.

    img2dataset writes the width and height of every image that it stored.
    """
    taken = pa.array(rows, pa.int64())
    widths, heights = (
        columns.column(name).take(taken).to_pylist() if name in columns.column_names else [None] * len(rows)
        for name in ("width", "height")
    )
    for row, width, height in zip(rows, widths, heights, strict=True):
        size = _size(width, height) or _size(scalars[row].get("width"), scalars[row].get("height"))
        if size:
            yield row, size


def _size(width: Scalar | None, height: Scalar | None) -> str:
    if not (isinstance(width, int | float) and isinstance(height, int | float) and width > 0 and height > 0):
        return ""
    return f"{width} x {height} pixels"


def _usable_names(names: Iterable[str], oddities: Oddities) -> list[str]:
    """Return the names of the columns to keep, sorted."""
    usable = sorted(n for n in names if n not in EXCLUDED and 0 < len(n) <= MAX_COLUMN_NAME_CHARS and n.isprintable())
    if len(usable) > MAX_COLUMNS:
        oddities.add("", "too_many_columns", f"{len(usable)} sidecar columns, the first {MAX_COLUMNS} are kept")
    return usable[:MAX_COLUMNS]


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


def _parquet_columns(path: Path, keys: Sequence[str], oddities: Oddities) -> dict[str, pa.Array]:
    """Read the scalar columns of a parquet and join them with `keys`; of a repeated key the first row counts."""
    check_regular(path)
    size = path.stat().st_size
    if size > MAX_SIDECAR_BYTES:
        raise ValueError(f"{size} bytes, limit {MAX_SIDECAR_BYTES}")
    with pq.ParquetFile(path) as file:
        if file.metadata.num_rows > MAX_SIDECAR_ROWS:
            raise ValueError(f"{file.metadata.num_rows} rows, limit {MAX_SIDECAR_ROWS}")
        kinds = {field.name: _target_type(field.type) for field in file.schema_arrow}
        if len(kinds) != len(file.schema_arrow) or kinds.get(KEY) != pa.string():
            raise ValueError("needs one string column 'key' and no repeated names")
        names = _usable_names((name for name, kind in kinds.items() if kind is not None), oddities)
        table = _read_bounded(file, pa.schema([(name, kinds[name]) for name in (KEY, *names)]))
    rows: dict[str, int] = {}
    for row, key in enumerate(table.column(KEY).to_pylist()):
        rows.setdefault(key, row)
    taken = pa.array([rows.get(key) for key in keys], pa.int64())
    columns = {name: table.column(name).combine_chunks().take(taken) for name in names}
    return {name: _nan_to_null(c) if c.type == pa.float64() else c for name, c in columns.items()}


def _read_bounded(file: pq.ParquetFile, schema: pa.Schema) -> pa.Table:
    """Read the columns of `schema`, cast to its types batch by batch, up to `MAX_SIDECAR_VALUE_BYTES`."""
    tables = []
    num_bytes = 0
    for batch in file.iter_batches(READ_ROWS, columns=schema.names, use_threads=False):
        table = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
        num_bytes += table.nbytes
        if num_bytes > MAX_SIDECAR_VALUE_BYTES:
            raise ValueError(f"more than {MAX_SIDECAR_VALUE_BYTES} bytes of values")
        tables.append(table)
    joined = pa.concat_tables(tables) if tables else schema.empty_table()
    joined.validate(full=True)  # a parquet may hold strings that are not UTF-8
    return joined


def _nan_to_null(array: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_nan(array), pa.scalar(None, pa.float64()), array)


def _json_columns(scalars: Sequence[dict[str, Scalar]], oddities: Oddities) -> dict[str, pa.Array]:
    """Make columns of the union of all entries; mixed types become strings of JSON."""
    names = _usable_names({name for row in scalars for name in row}, oddities)
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
