"""The columns of a shard's parquet: read one after the other, joined with its samples by key, cast to stored types."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataserver.dataset.errors import Findings
from dataserver.dataset.kinds import UNUSABLE_COLUMN
from dataserver.dataset.shards.column_types import MAX_SIDECAR_VALUE_BYTES, READ_ROWS, target_type
from dataserver.dataset.shards.lone_texts import SUCCESS
from dataserver.dataset.shards.parquet.stored import OpenParquet, open_parquet, together
from dataserver.dataset.shards.row_match import RowMatch
from dataserver.dataset.shards.sidecar_columns import (
    EXCLUDED,
    INT64_RANGE,
    nan_to_null,
    refusing,
    report_misfits,
    usable_names,
)
from dataserver.dataset.storage.registry import storage_of

MAX_SIDECAR_BYTES: Final = 1 << 30
MAX_SIDECAR_ROWS: Final = 1 << 22
RUN_ROWS: Final = 1 << 21
"""Rows whose keys are held at a time, where a parquet is about all shards."""
KEY: Final = "key"
STATUS: Final = "status"


class FoundColumns(NamedTuple):
    """What a parquet says of some samples."""

    columns: dict[str, pa.Array]
    """Columns by name, with a value or null for each sample."""
    has_row: pa.BooleanArray
    """Which samples have a row."""


def parquet_columns(path: Path, keys: Sequence[str], findings: Findings, match: RowMatch) -> FoundColumns:
    """Read the scalar columns of a parquet and join them with `keys`; of a repeated key the first row counts.

    Columns that cannot be used, and values that do not fit, are counted in `findings`. Of a parquet with rows for all
    shards only the row groups are read that may have these keys, by the statistics of the key.

    Args:
        path: the parquet.
        keys: of the samples, in row order.
        findings: see above; rows without a sample and samples without a row are counted there, too.
        match: how rows find samples.

    Raises:
        DatasetError: no row finds a sample.
        ValueError, ArrowException, OSError: the parquet cannot be used at all, or storage failed (with an errno).
    """
    size = storage_of(path).etag(str(path)).num_bytes
    if size > MAX_SIDECAR_BYTES and not match.is_of_all:
        raise ValueError(f"{size} bytes, limit {MAX_SIDECAR_BYTES}")
    with open_parquet(path) as opened:
        metadata = opened.parquet.metadata
        groups = _row_groups(metadata, keys, match)
        if match.is_of_all and not groups:
            return FoundColumns({}, pa.array([False] * len(keys), pa.bool_()))
        _check_rows(metadata, groups, match.is_of_all)
        return _columns(opened, groups, keys, path.name, findings, match)


def _check_rows(metadata: pq.FileMetaData, groups: Sequence[int], is_of_all: bool) -> None:
    """Raise ValueError if row groups have too many rows, or other numbers of them in two parts of the footer."""
    num_rows = sum(metadata.row_group(group).num_rows for group in groups)
    if num_rows > MAX_SIDECAR_ROWS:
        sort = "; sort the rows by key, then only the row groups of a shard are read" if is_of_all else ""
        raise ValueError(f"{num_rows} rows, limit {MAX_SIDECAR_ROWS}{sort}")
    if len(groups) == metadata.num_row_groups and num_rows != metadata.num_rows:
        raise ValueError(f"its row groups have {num_rows} rows, its footer says {metadata.num_rows}")


def _columns(
    opened: OpenParquet,
    groups: Sequence[int],
    keys: Sequence[str],
    file_name: str,
    findings: Findings,
    match: RowMatch,
) -> FoundColumns:
    schema = opened.parquet.schema_arrow
    kinds = {field.name: target_type(field.type) for field in schema}
    if len(kinds) != len(schema) or kinds.get(KEY) != pa.string():
        raise ValueError("needs one string column 'key' and no repeated names")
    for name, kind in kinds.items():
        held = schema.field(name).type
        if kind is None and name not in EXCLUDED and not pa.types.is_null(held):
            findings.add("", UNUSABLE_COLUMN, f"{name}: a column of type {held}, which no filter can compare")
    names = usable_names([name for name, kind in kinds.items() if kind is not None], findings)
    left = MAX_SIDECAR_VALUE_BYTES
    known = _unfolded(_read(opened, KEY, left, groups), left).cast(pa.string())
    statuses = None
    if STATUS in names and kinds[STATUS] == pa.string():
        with refusing(UNUSABLE_COLUMN, STATUS, Findings()):  # counted with the other columns
            statuses = _unfolded(_read(opened, STATUS, left, groups), left).cast(pa.string())
    rows = match.rows(known, statuses, keys, file_name, findings)
    del known, statuses
    columns: dict[str, pa.Array] = {}
    for name in names if rows.null_count < len(rows) or not match.is_of_all else ():
        with refusing(UNUSABLE_COLUMN, name, findings):
            taken = _unfolded(_read(opened, name, left, groups).take(rows), left)
            columns[name] = _fitted(name, taken, kinds[name], keys, findings)
            left -= columns[name].nbytes
    return FoundColumns(columns, rows.is_valid())


def _row_groups(metadata: pq.FileMetaData, keys: Sequence[str], match: RowMatch) -> list[int]:
    """The row groups that may have a row for one of the samples."""
    groups = range(metadata.num_row_groups)
    number = next((n for n in range(metadata.num_columns) if metadata.schema.column(n).path == KEY), None)
    if not match.is_of_all or match.by_last_part or not keys or number is None:
        return list(groups)
    first, last = min(keys).encode(), max(keys).encode()  # the order of UTF-8 is that of code points
    return [group for group in groups if _may_have(metadata.row_group(group).column(number).statistics, first, last)]


def _may_have(statistics: pq.Statistics | None, first: bytes, last: bytes) -> bool:
    """Whether a row group has values between two, as far as its statistics tell."""
    if statistics is None or not statistics.has_min_max or not isinstance(statistics.min, str):
        return True
    return bool(statistics.min.encode() <= last and first <= statistics.max.encode())


def failed_rows(path: Path) -> dict[str, str]:
    """Return the status of each row of a parquet that is no success, by key; nothing where it does not say.

    Raises OSError where storage failed.
    """
    found: dict[str, str] = {}
    with refusing(UNUSABLE_COLUMN, STATUS, Findings()), open_parquet(path) as opened:  # `parquet_columns` counts it
        metadata = opened.parquet.metadata
        groups = range(metadata.num_row_groups)
        _check_rows(metadata, groups, is_of_all=False)
        columns = _strings(opened, [KEY, STATUS], groups)
        if len(columns) == 2:
            for key, status in zip(columns[KEY].to_pylist(), columns[STATUS].to_pylist(), strict=True):
                if key is not None and status is not None and status != SUCCESS:
                    found.setdefault(key, status)
    return found


def keys_and_failures(path: Path, max_rows: int = RUN_ROWS) -> Iterator[tuple[pa.LargeStringArray, pa.BooleanArray]]:
    """Yield the key of each row of a parquet, and whether its status is given and no success.

    A parquet may have more rows than memory holds: it is read in runs of whole row groups, of up to `max_rows` rows
    unless one row group alone has more.

    Raises ValueError, ArrowException, OSError: it cannot be read, or has no keys.
    """
    with open_parquet(path) as opened:
        metadata = opened.parquet.metadata
        if KEY not in _strings(opened, [KEY], []):
            raise ValueError(f"{path} has no column of strings called {KEY}")
        for groups in _runs(metadata, max_rows):
            _check_rows(metadata, groups, is_of_all=False)
            columns = _strings(opened, [KEY, STATUS], groups)
            keys = columns[KEY].cast(pa.large_string())
            if STATUS in columns:
                yield keys, pc.fill_null(pc.not_equal(columns[STATUS], SUCCESS), False)
            else:
                yield keys, pa.array(np.zeros(len(keys), np.bool_))


def _runs(metadata: pq.FileMetaData, max_rows: int) -> Iterator[list[int]]:
    """Row groups that follow each other, with up to so many rows or one row group. Raises ValueError."""
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if sum(sizes) != metadata.num_rows:
        raise ValueError(f"its row groups have {sum(sizes)} rows, its footer says {metadata.num_rows}")
    run: list[int] = []
    num_rows = 0
    for group, size in enumerate(sizes):
        if run and num_rows + size > max_rows:
            yield run
            run, num_rows = [], 0
        run.append(group)
        num_rows += size
    if run:
        yield run


def _strings(opened: OpenParquet, names: Sequence[str], groups: Sequence[int]) -> dict[str, pa.StringArray]:
    """Those of these columns that hold strings, by name, in some row groups."""
    limit = MAX_SIDECAR_VALUE_BYTES
    kinds = {field.name: target_type(field.type) for field in opened.parquet.schema_arrow}
    found = [name for name in names if kinds.get(name) == pa.string()]
    return {name: _unfolded(_read(opened, name, limit, groups), limit).cast(pa.string()) for name in found}


def _read(opened: OpenParquet, name: str, max_bytes: int, groups: Sequence[int]) -> pa.ChunkedArray:
    """Read one column with its dictionaries. Raises ValueError before it takes more than `max_bytes`."""
    metadata = opened.parquet.metadata
    leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == name)
    of_groups = [{leaf: opened.column(group, leaf)} for group in groups]
    stored = together([group[leaf] for group in of_groups])
    _check_bytes(stored.plain_bytes, max_bytes)
    folded = opened.foldable({name: leaf}, of_groups)
    is_string = metadata.schema.column(leaf).physical_type == "BYTE_ARRAY"
    num_rows = max(metadata.num_rows, 1)
    if stored.unfolds and is_string and not folded:
        num_rows = min(READ_ROWS, max(max_bytes // max(stored.plain_bytes, 1), 1))
    parts = []
    num_bytes = 0
    file = opened.keeping_dictionaries(folded)
    for batch in file.iter_batches(num_rows, row_groups=list(groups), columns=[name], use_threads=False):
        parts.append(_plain(batch.column(name)))
        num_bytes += parts[-1].nbytes
        _check_bytes(num_bytes, max_bytes)
    nothing = _plain(pa.nulls(0, opened.parquet.schema_arrow.field(name).type))
    return pa.chunked_array(parts or [nothing])


def _plain(values: pa.Array) -> pa.Array:
    """Arrow cannot take values out of views."""
    return values.cast(pa.string()) if pa.types.is_string_view(values.type) else values


def _check_bytes(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ValueError(f"{num_bytes} bytes of values, {max_bytes} are left of {MAX_SIDECAR_VALUE_BYTES}")


def _unfolded(values: pa.ChunkedArray, max_bytes: int) -> pa.Array:
    """Put every string in its place. Raises ValueError where they take more than `max_bytes`, before they do."""
    whole = values.unify_dictionaries().combine_chunks()
    if pa.types.is_dictionary(whole.type):
        lengths = pc.binary_length(whole.dictionary).take(whole.indices)
        _check_bytes(pc.sum(lengths.cast(pa.int64())).as_py() or 0, max_bytes)
        whole = whole.dictionary_decode()
    whole.validate(full=True)  # a parquet may hold strings that are not UTF-8
    return whole


def _fitted(name: str, values: pa.Array, kind: pa.DataType, keys: Sequence[str], findings: Findings) -> pa.Array:
    """Cast to a stored type; what does not fit is null."""
    fitting = values
    if pa.types.is_uint64(values.type):
        large = pc.greater(values, pa.scalar(INT64_RANGE[-1], pa.uint64()))
        fitting = pc.if_else(large, pa.scalar(None, pa.uint64()), values)
    kept = fitting.cast(kind)
    if kept.null_count > values.null_count:
        report_misfits(name, values.to_pylist(), kept, keys, findings)
    return nan_to_null(kept)
