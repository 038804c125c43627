"""The columns of a Parquet shard besides its images, and the members that a row becomes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from dataserver.dataset.errors import Findings, SampleError
from dataserver.dataset.kinds import DUPLICATE_KEY, ODD_VALUES, UNUSABLE_COLUMN, UNUSED_PART
from dataserver.dataset.shards.interface import Member
from dataserver.dataset.shards.members import MAX_TEXT_BYTES, parse_document
from dataserver.dataset.shards.parquet.chunk import Value
from dataserver.dataset.shards.parquet_columns import MAX_SIDECAR_VALUE_BYTES, READ_ROWS, target_type
from dataserver.dataset.shards.parts import ImagePart
from dataserver.dataset.shards.tar import name_problem

KEY_NAMES: Final = ("__key__", "key")
CAPTION_NAMES: Final = ("txt", "text", "caption")
"""The first of these that a file has as a column of strings is used; else rows have numbers, and no caption."""
JSON_NAME: Final = "json"
TEXTS_NAME: Final = "texts"
_PLAIN: Final = frozenset({"PLAIN", "RLE", "BIT_PACKED"})
"""Of what is encoded so, no value is longer than where it is stored."""


class Row(NamedTuple):
    """What the other columns say of one row."""

    key: str | None
    caption: bytes | SampleError
    """Or why there is none."""
    document: dict[str, Any]
    paths: list[Any]
    """Of each column of images, in that order: what its `path` says."""


class NamedColumn(Protocol):
    """What is asked of a column of images."""

    @property
    def name(self) -> str:
        """Of the column."""

    @property
    def is_list(self) -> bool:
        """Whether a row has a list of images."""


class OtherColumns:
    """Reads all columns but the bytes of images, a row group at a time."""

    def __init__(self, parquet: pq.ParquetFile, images: Mapping[str, bool], findings: Findings) -> None:
        """Choose the columns.

        Args:
            parquet: the file.
            images: columns of images, each with whether it has paths.
            findings: where columns are counted that nothing can use.
        """
        self._parquet = parquet
        self._findings = findings
        self._images = images
        self._types: dict[str, pa.DataType | None] = {}
        self._told: set[str] = set()
        schema = parquet.schema_arrow
        if len(set(schema.names)) != len(schema.names):
            raise ValueError("two columns have one name")
        strings = {field.name for field in schema if target_type(field.type) == pa.string() and _is_text(field.type)}
        self._key = next((name for name in KEY_NAMES if name in strings), None)
        self._caption = next((name for name in CAPTION_NAMES if name in strings), None)
        names = " or ".join(CAPTION_NAMES)
        self._no_caption = SampleError("missing_caption", f"no column of strings is called {names}; rename it")
        if self._caption:
            self._no_caption = SampleError("missing_caption", f"its column {self._caption} is null")
        for field in schema:
            if field.name in images:
                continue
            kind = target_type(field.type)
            if kind is not None or _is_document(field):
                self._types[field.name] = kind
            elif not pa.types.is_null(field.type):
                detail = f"{field.name}: a column of type {field.type}, which no filter can compare"
                findings.add("", UNUSABLE_COLUMN, detail[:200])
        self._leaves = self._wanted()

    def rows(self, group: int, num_rows: int) -> Iterator[Row]:
        """Yield the rows of a row group. Raises ValueError or what Arrow raises where they cannot be read."""
        if not self._leaves:
            yield from (Row(None, self._no_caption, {}, [None] * len(self._images)) for _ in range(num_rows))
            return
        done = 0
        batches = self._parquet.iter_batches(
            self._batch_rows(group), row_groups=[group], columns=self._leaves, use_threads=False
        )
        for batch in batches:
            yield from self._rows(batch)
            done += batch.num_rows
        if done != num_rows:
            raise ValueError(f"row group {group} has {num_rows} rows, its columns have {done}")

    def _wanted(self) -> list[str]:
        """The paths of the leaves that are read."""
        wanted = []
        for n in range(len(self._parquet.schema)):
            path = self._parquet.schema.column(n).path
            top = next((name for name in (*self._types, *self._images) if _is_within(path, name)), None)
            if top in self._types or (top is not None and self._images[top] and path.endswith(".path")):
                wanted.append(path)
        return wanted

    def _batch_rows(self, group: int) -> int:
        """How many rows are decoded at a time. Of a dictionary, a few bytes are a long value in each row."""
        held = self._parquet.metadata.row_group(group)
        wanted = frozenset(self._leaves)
        leaves = [column for n in range(held.num_columns) if (column := held.column(n)).path_in_schema in wanted]
        total: int = sum(leaf.total_uncompressed_size for leaf in leaves)
        if total > MAX_SIDECAR_VALUE_BYTES:
            raise ValueError(f"{total} bytes of texts in row group {group}, limit {MAX_SIDECAR_VALUE_BYTES}")
        folded: int = sum(leaf.total_uncompressed_size for leaf in leaves if not _PLAIN.issuperset(leaf.encodings))
        return max(1, min(READ_ROWS, MAX_SIDECAR_VALUE_BYTES // max(folded, 1)))

    def _rows(self, batch: pa.RecordBatch) -> Iterator[Row]:
        present = {name: batch.column(n) for n, name in enumerate(batch.schema.names)}
        values = {name: self._values(name, present[name]) for name in self._types if name in present}
        nothing = [None] * batch.num_rows
        keys = values.pop(self._key, nothing) if self._key else nothing
        captions = _as_bytes(present[self._caption]) if self._caption else []
        if self._caption:
            values.pop(self._caption)
        paths = [present[name].to_pylist() if name in present else nothing for name in self._images]
        for n in range(batch.num_rows):
            document = {name: column[n] for name, column in values.items() if column[n] is not None}
            caption = captions[n] if captions else None
            yield Row(keys[n], self._no_caption if caption is None else caption, document, [of[n] for of in paths])

    def _values(self, name: str, array: pa.Array) -> list[Any]:
        """The values of a column as JSON has them."""
        kind = self._types[name]
        if name == self._caption:
            return []
        if kind == pa.string() and _is_text(array.type):
            found = [_decoded(value) for value in _as_bytes(array)]
            odd = [value for value in found if isinstance(value, bytes)]
            if odd and name not in self._told:
                self._told.add(name)
                self._findings.add(
                    "", ODD_VALUES, f"{name}: values that are not UTF-8 and are null, as {odd[0][:40]!r}"
                )
            return [None if isinstance(value, bytes) else value for value in found]
        if kind is None:
            return list(array.to_pylist())
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if pa.types.is_uint64(array.type) or pa.types.is_boolean(array.type) or pa.types.is_integer(array.type):
            return list(array.to_pylist())  # what is too large for a column is said there
        return list(array.cast(kind).to_pylist())


def row_members(
    number: int,
    row: Row,
    columns: Sequence[NamedColumn],
    images: Sequence[Sequence[Value | bytes]],
    keys: set[str],
    findings: Findings,
) -> Iterator[Member]:
    """Yield the members of one row: its images, `txt` and `json`.

    Args:
        number: of the row in the file, which is its key where it has none of its own.
        row: its other columns.
        columns: of images.
        images: values of each, or their bytes.
        keys: of the rows before; the row's own one is added.
        findings: where a key is counted that cannot be used, or came before.
    """
    key = f"{number:09d}"
    if row.key:
        if problem := name_problem(row.key):
            findings.add("", "unsafe_name", f"row {number}: its key {row.key[:80]!a} {problem}; it is called {key}")
        else:
            key = row.key
    if key in keys:
        findings.add(key, DUPLICATE_KEY, f"row {number}: the key came before in this file, and its first row counts")
        return
    keys.add(key)
    document = _document(key, row.document, findings)
    texts = document.get(TEXTS_NAME)
    listed = next((position for position, column in enumerate(columns) if column.is_list), None)
    for position, (column, values, path) in enumerate(zip(columns, images, row.paths, strict=True)):
        paths = path if column.is_list else [path]
        names = []
        for n, value in enumerate(values if column.is_list or values else [None]):
            name = f"{n}.img" if column.is_list and (len(values) > 1 or isinstance(texts, list)) else "img"
            name = name if position == 0 else f"{column.name.lower()}.{name}"
            part: Value | bytes = value
            if part is None and (stated := _path(paths, n)):
                part = _without_bytes(column.name, stated)
            names.append(None if part is None else f"{key}.{name}")
            if part is not None:
                yield _image_member(name, key, part)
        if position == listed and isinstance(texts, list):
            document["images"] = names
    if isinstance(row.caption, bytes):
        yield Member("txt", 0, len(row.caption), row.caption, key=key)
    elif not isinstance(texts, list) and not isinstance(document.get("caption"), str):
        yield Member("txt", 0, 0, None, key=key, parsed=row.caption)
    yield Member("json", 0, 0, None, key=key, parsed=_too_large(document) or document)


def _image_member(name: str, key: str, part: ImagePart | SampleError | bytes) -> Member:
    if isinstance(part, bytes):
        return Member(name, 0, len(part), part, key=key)
    offset, length = (part.offset, part.length) if isinstance(part, ImagePart) else (0, 0)
    return Member(name, offset, length, None, key=key, parsed=part)


def _document(key: str, given: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """The columns of a row, with what its column `json` says."""
    held = given.get(JSON_NAME)
    if held is None:
        return given
    rest = {name: value for name, value in given.items() if name != JSON_NAME}
    if isinstance(held, str):
        try:
            if len(held) > MAX_TEXT_BYTES:
                raise SampleError("text_too_large", f"{len(held)} characters, limit {MAX_TEXT_BYTES}")
            held = parse_document(held)
        except SampleError as error:
            findings.add(key, UNUSED_PART, f"json: {error.detail} ({error.kind}); the sample does without it")
            return rest
    return {**held, **rest}


def _too_large(document: Mapping[str, Any]) -> SampleError | None:
    """Why the columns of a row are refused, as a member .json of that size would be."""
    texts = (text for value in document.values() for text in (value if isinstance(value, list) else [value]))
    size = sum(len(text) for text in texts if isinstance(text, str))
    if size <= MAX_TEXT_BYTES:
        return None
    return SampleError("text_too_large", f"{size} characters in its columns, limit {MAX_TEXT_BYTES}")


def _without_bytes(column: str, path: str) -> SampleError:
    remedy = "write the file again with its images in it (datasets: embed_table_storage)"
    return SampleError("missing_image", f"{column}: the row names {path[:80]!a} and holds no bytes; {remedy}")


def _path(paths: Any, n: int) -> str:
    """What stands beside the bytes of a value, if that is the name of a file."""
    if not isinstance(paths, list) or n >= len(paths) or not isinstance(paths[n], dict):
        return ""
    found = paths[n].get("path")
    return found if isinstance(found, str) else ""


def _is_document(field: pa.Field) -> bool:
    """Whether a column is `json`, or the texts of documents."""
    if field.name == JSON_NAME:
        return bool(pa.types.is_struct(field.type))
    is_list = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
    return field.name == TEXTS_NAME and is_list and _is_text(field.type.value_type)


def _is_text(kind: pa.DataType) -> bool:
    """Whether values are strings as they are stored, and not dates that become some."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


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


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")
