"""The columns of a Parquet shard besides its images."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataserver.dataset.errors import Findings, SampleError
from dataserver.dataset.kinds import ODD_VALUES, UNUSABLE_COLUMN
from dataserver.dataset.shards.column_types import MAX_SIDECAR_VALUE_BYTES, READ_ROWS, is_text, target_type
from dataserver.dataset.shards.conversations import TURN_NAMES
from dataserver.dataset.shards.documents import INFOS_NAME, SENTENCES_NAME, TEXTS_NAME
from dataserver.dataset.shards.members import MAX_TEXT_BYTES
from dataserver.dataset.shards.parquet.stored import (
    OpenParquet,
    StoredColumn,
    chunk_bounds,
    string_bytes,
    together,
)
from dataserver.dataset.shards.row_members import CAPTION_LISTS, CAPTION_NAMES, JSON_NAME, KEY_NAMES, Row, no_keys

MAX_ROW_BYTES: Final = 8 * MAX_TEXT_BYTES
"""Bytes of all strings of one row. Dictionaries of a few bytes can hold a long one for each element of each row."""
_UNFOLDED_BYTES: Final = 64 << 20
"""Strings that are unfolded at a time."""
Lists = frozenset[str] | None
"""Columns that are lists of texts and are wanted as such, since captions may be their elements; None for all."""


class RowColumns:
    """What the columns of a table besides its images become, for any reader of tables."""

    def __init__(
        self, schema: pa.Schema, images: Mapping[str, bool], findings: Findings, lists: Lists = frozenset()
    ) -> None:
        """Choose the columns.

        Args:
            schema: of the table.
            images: columns of images, each with whether it has paths.
            findings: where columns are counted that nothing can use.
            lists: see `Lists`.

        Raises:
            ValueError: two columns have one name.
        """
        self._findings = findings
        self._images = images
        self.types: dict[str, pa.DataType | None] = {}
        """Columns that are used, with what their values become; None for those of documents and for lists."""
        self._told: set[str] = set()
        if len(set(schema.names)) != len(schema.names):
            raise ValueError("two columns have one name")
        strings = {field.name for field in schema if target_type(field.type) == pa.string() and is_text(field.type)}
        self._key = next((name for name in KEY_NAMES if name in strings), None)
        self._caption = next((name for name in CAPTION_NAMES if name in strings), None)
        if self._key is None:
            for field in (field for field in schema if field.name in KEY_NAMES):
                findings.add("", UNUSABLE_COLUMN, f"{field.name}: {no_keys(field.type)}")
        names = " or ".join(CAPTION_NAMES)
        self.no_caption = SampleError("missing_caption", f"no column of strings is called {names}; rename it")
        if self._caption:
            self.no_caption = SampleError("missing_caption", f"its column {self._caption} is null")
        for field in schema:
            if field.name in images:
                continue
            kind, are_texts = target_type(field.type), _is_list(field, is_text)
            is_wanted = are_texts and (lists is None or field.name in lists)
            if kind is not None or is_wanted or _is_document(field, schema):
                self.types[field.name] = kind
            elif not pa.types.is_null(field.type):
                detail = f"{field.name}: a column of type {field.type}, which no filter can compare"
                hint = f"; these can be captions: index --caption 'NAME=parquet:{field.name[:40]}[0]'"
                findings.add("", UNUSABLE_COLUMN, detail[: 200 - len(hint)] + hint if are_texts else detail[:200])
                if are_texts and field.name in CAPTION_LISTS and not self._caption:
                    problem = f"its column {field.name} is a list of texts{hint}"
                    self.no_caption = SampleError("missing_caption", problem)

    def rows(self, batch: pa.RecordBatch) -> Iterator[Row]:
        """Yield the rows of a batch, whose columns may lack some. Raises what Arrow raises."""
        present = {name: batch.column(n) for n, name in enumerate(batch.schema.names)}
        others = self.types.keys() - {self._caption}
        values = {name: self._values(name, array) for name, array in present.items() if name in others}
        nothing = [None] * batch.num_rows
        keys = values.pop(self._key) if self._key else nothing
        captions = _as_bytes(present[self._caption]) if self._caption else nothing
        paths = [present[name].to_pylist() if name in present else nothing for name in self._images]
        for n in range(batch.num_rows):
            document = {name: column[n] for name, column in values.items() if column[n] is not None}
            caption = captions[n]
            yield Row(keys[n], self.no_caption if caption is None else caption, document, [of[n] for of in paths])

    def _note_odd(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._findings.add("", ODD_VALUES, f"{name}: values that are not UTF-8 and are null, {what}")

    def _values(self, name: str, array: pa.Array) -> list[Any]:
        """The values of a column as JSON has them."""
        kind = self.types[name]
        if kind == pa.string() and is_text(array.type):
            found = [_decoded(value) for value in _as_bytes(array)]
            if odd := [value for value in found if isinstance(value, bytes)]:
                self._note_odd(name, f"as {odd[0][:40]!r}")
            return [None if isinstance(value, bytes) else value for value in found]
        if kind is None:
            try:
                return list(array.to_pylist())
            except UnicodeDecodeError:
                if not _is_list(pa.field(name, array.type), is_text):
                    raise
            self._note_odd(name, "in a list of texts")
            plain = array.cast(pa.large_list(pa.large_binary())).to_pylist()
            return [None if of is None else [_text_or_none(value) for value in of] for of in plain]
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if pa.types.is_integer(array.type):
            return list(array.to_pylist())  # what is too large for a column is said there
        return list(array.cast(kind).to_pylist())


class OtherColumns:
    """Reads all columns but the bytes of images, a row group at a time."""

    def __init__(
        self, source: OpenParquet, images: Mapping[str, bool], findings: Findings, lists: Lists = frozenset()
    ) -> None:
        """Choose the columns; nothing of them is read yet.

        Args:
            source: the file.
            images: columns of images, each with whether it has paths.
            findings: where columns are counted that nothing can use.
            lists: see `Lists`.

        Raises:
            ValueError: the columns cannot be read.
        """
        self._images = images
        self._source = source
        self._columns = RowColumns(source.parquet.schema_arrow, images, findings, lists)
        self._leaves = self._wanted(source)
        self._folded: frozenset[str] = frozenset()
        self._parquet: pq.ParquetFile | None = None

    def check(self, groups: Iterable[int]) -> None:
        """Walk the pages of row groups. Raises ValueError where the columns cannot be read."""
        for group in groups:
            self._walk(group)

    def ranges(self, group: int) -> list[tuple[int, int]]:
        """Where the columns of a row group lie, as its footer says: first bytes and the ones behind the last.

        They have no more bytes than values may have.
        """
        held = self._source.parquet.metadata.row_group(group)
        found, left = [], MAX_SIDECAR_VALUE_BYTES
        for leaf in self._leaves.values():
            start, end = chunk_bounds(held.column(leaf))
            found.append((start, min(end, start + left)))
            left -= max(found[-1][1] - start, 0)
        return found

    def rows(self, group: int, num_rows: int) -> Iterator[Row]:
        """Yield the rows of a row group. Raises ValueError or what Arrow raises where they cannot be read."""
        if not self._leaves:
            no_caption = self._columns.no_caption
            yield from (Row(None, no_caption, {}, [None] * len(self._images)) for _ in range(num_rows))
            return
        stored = self._walk(group)
        parquet = self._folding(stored)
        done = 0
        batches = parquet.iter_batches(
            self._batch_rows(stored), row_groups=[group], columns=list(self._leaves), use_threads=False
        )
        for batch in batches:
            for part in self._parts(batch):
                yield from self._columns.rows(part) if isinstance(part, pa.RecordBatch) else [part]
            done += batch.num_rows
        if done != num_rows:
            raise ValueError(f"row group {group} has {num_rows} rows, its columns have {done}")

    def _wanted(self, source: OpenParquet) -> dict[str, int]:
        """The leaves that are read, by their paths: the number of each."""
        wanted = {}
        for n in range(len(source.parquet.schema)):
            path = source.parquet.schema.column(n).path
            top = next((name for name in (*self._columns.types, *self._images) if _is_within(path, name)), None)
            if top in self._columns.types or (top is not None and self._images[top] and path.endswith(".path")):
                wanted[path] = n
        return wanted

    def _walk(self, group: int) -> dict[int, StoredColumn]:
        """What a row group takes, by the numbers of the leaves. Raises ValueError where that is too much."""
        stored = {leaf: self._source.column(group, leaf) for leaf in self._leaves.values()}
        total = together(list(stored.values())).plain_bytes
        if total > MAX_SIDECAR_VALUE_BYTES:
            raise ValueError(f"{total} bytes of texts in row group {group}, limit {MAX_SIDECAR_VALUE_BYTES}")
        for leaf, column in stored.items():
            held = self._source.parquet.schema.column(leaf)
            if column.shares_prefixes and held.max_repetition_level:
                remedy = "write it with column_encoding PLAIN"
                raise ValueError(f"{held.path[:80]}: a list of strings as DELTA_BYTE_ARRAY; {remedy}")
        return stored

    def _folding(self, stored: Mapping[int, StoredColumn]) -> pq.ParquetFile:
        """The file with the dictionaries of a row group as they are, opened anew where others were read before."""
        folded = self._source.foldable(self._leaves, [stored])
        if self._parquet is None or folded != self._folded:
            self._parquet, self._folded = self._source.keeping_dictionaries(folded), folded
        return self._parquet

    def _batch_rows(self, stored: Mapping[int, StoredColumn]) -> int:
        """How many rows are decoded at a time. Of some encodings, a few bytes are a long value in each row."""
        unfolded = sum(
            column.plain_bytes
            for path, leaf in self._leaves.items()
            if path not in self._folded and (column := stored[leaf]).unfolds
        )
        return max(1, min(READ_ROWS, MAX_SIDECAR_VALUE_BYTES // max(unfolded, 1)))

    def _parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch | Row]:
        """Yield the rows of a batch in parts whose strings fit in memory; what does not fit is a row that says so."""
        sizes = sum((string_bytes(column) for column in batch.columns), np.zeros(batch.num_rows, np.int64)).tolist()
        first = num_bytes = 0
        for row, size in enumerate(sizes):
            if row > first and num_bytes + size > _UNFOLDED_BYTES:
                yield batch.slice(first, row - first)
                first, num_bytes = row, 0
            num_bytes += size
            if size > MAX_ROW_BYTES:
                if row > first:
                    yield batch.slice(first, row - first)
                problem = SampleError(
                    "text_too_large", f"{size} bytes in the columns of one row, limit {MAX_ROW_BYTES}"
                )
                yield Row(None, problem, {}, [None] * len(self._images), problem)
                first, num_bytes = row + 1, 0
        if first < batch.num_rows:
            yield batch.slice(first)


def _is_document(field: pa.Field, schema: pa.Schema) -> bool:
    """Whether a column is `json`, the turns of conversations, or a part of documents."""
    if field.name == JSON_NAME:
        return bool(pa.types.is_struct(field.type))
    if field.name in TURN_NAMES:
        return _is_list(field, pa.types.is_struct)
    if field.name in (SENTENCES_NAME, INFOS_NAME) and {SENTENCES_NAME, INFOS_NAME} <= set(schema.names):
        are_texts = _is_list(schema.field(SENTENCES_NAME), is_text)
        return are_texts and _is_list(schema.field(INFOS_NAME), pa.types.is_struct)
    return field.name == TEXTS_NAME and _is_list(field, is_text)


def _is_list(field: pa.Field, of: Callable[[pa.DataType], bool]) -> bool:
    return (pa.types.is_list(field.type) or pa.types.is_large_list(field.type)) and of(field.type.value_type)


def _as_bytes(array: pa.Array) -> list[bytes | None]:
    """The bytes of strings, whether they are UTF-8 or not."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string_view(array.type):
        array = array.cast(pa.string())
    large = pa.types.is_large_string(array.type)
    return list(array.cast(pa.large_binary() if large else pa.binary()).to_pylist())


def _decoded(value: bytes | None) -> str | bytes | None:
    """A string, or the bytes themselves where they are none."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _text_or_none(value: bytes | None) -> str | None:
    found = _decoded(value)
    return found if isinstance(found, str) else None


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")
