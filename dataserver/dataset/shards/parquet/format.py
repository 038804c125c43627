"""Parquet files with image bytes as shards: a row becomes the members of a sample.

Images are columns of bytes, structures {bytes, path} as `datasets` writes them, and lists of these. Their values are
found in the one pass that hashes the file; all other columns are read by Arrow, row group by row group.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from dataserver.audio import AUDIO_SUFFIXES
from dataserver.dataset.errors import Findings, RefusedShardError, SampleError, is_of_storage
from dataserver.dataset.kinds import CORRUPT_PARQUET, NEEDS_CONVERT, ODD_VALUES, UNUSABLE_COLUMN
from dataserver.dataset.shards.column_types import is_text, without_dictionary
from dataserver.dataset.shards.interface import ShardSource
from dataserver.dataset.shards.members import Member
from dataserver.dataset.shards.modalities import (
    AUDIO,
    ENDINGS,
    IMAGES,
    ONLY_IMAGES,
    VIDEO,
    Media,
    media_of,
)
from dataserver.dataset.shards.parquet.chunk import Chunk, ChunkReader, ReadImage
from dataserver.dataset.shards.parquet.footer import EncryptedError
from dataserver.dataset.shards.parquet.rows import OtherColumns
from dataserver.dataset.shards.parquet.stored import OpenParquet, chunk_bounds, open_parquet
from dataserver.dataset.shards.parts import Value
from dataserver.dataset.shards.row_members import row_members
from dataserver.dataset.storage.registry import storage_of
from dataserver.images import IMAGE_SUFFIXES
from dataserver.video import VIDEO_SUFFIXES

MAX_ROWS: Final = 1 << 22
MAX_VALUES: Final = 1 << 22
"""Values of all columns of images in one file, nulls included."""
MAX_LEAVES: Final = 4096
"""Columns of one file, each field of a structure counted."""
MAX_IMAGE_COLUMNS: Final = 64
UNREADABLE: Final = (pa.ArrowException, OSError, ValueError, OverflowError)
"""What is raised where a file cannot be read, OverflowError for times that Python does not have."""
MAGIC: Final = b"PAR1"
ENCRYPTED_MAGIC: Final = b"PARE"
ENCRYPTED: Final = "the file is encrypted, and no key can be given; decrypt it"
IMAGE_NAMES: Final = IMAGE_SUFFIXES | {"image", "images", "bytes", "image_bytes"}
"""Columns of bytes with these names hold images; others do where their bytes begin as those of one."""


MUST_BE_IMAGES: Final = IMAGE_SUFFIXES | {"image", "images"}
"""Columns of strings or structures with these names would be images, if they had bytes."""
_NAMES: Final = {
    VIDEO.ending: VIDEO_SUFFIXES | {"video", "videos"},
    AUDIO.ending: AUDIO_SUFFIXES | {"audio", "audios"},
}
"""Where audio or video is served, columns of bytes, strings or structures with these names hold it in the same way."""


@dataclass(frozen=True, slots=True)
class ImageColumn:
    """A column that holds images, or is named as one that does."""

    name: str
    is_list: bool
    has_path: bool
    is_image: bool
    """Whether its values claim to be images, whatever they begin with."""
    leaf: int
    """Number of the leaf that holds the bytes; negative where the column is named as one of images and holds none."""
    element_def: int
    """Definition level, in a list, from which on there is an element; 0 otherwise."""
    ending: str = "img"
    """What names of members end in, as in `NamedColumn`; what begins as another is that all the same."""

    @property
    def has_bytes(self) -> bool:
        """Whether the column holds bytes of images, as in `NamedColumn`."""
        return self.leaf >= 0


def scan_rows(source: ShardSource, findings: Findings) -> Iterator[Member]:
    """Yield the members of the rows in order; as `ShardFormat.scan`.

    Of a file in a store each byte is asked for once: what is read of other columns is held when the reader passes it.
    """
    if source.reader.peek(len(MAGIC)) == ENCRYPTED_MAGIC:
        findings.add("", NEEDS_CONVERT, ENCRYPTED)
        return
    try:
        with open_parquet(source.path) as opened:
            yield from _scan(opened, source, findings)
    except EncryptedError as error:
        findings.add("", NEEDS_CONVERT, str(error))
    except MemoryError:  # Arrow's is one of its exceptions as well
        raise
    except UNREADABLE as error:
        if is_of_storage(error):
            raise
        findings.add("", CORRUPT_PARQUET, f"the rest of the file cannot be read: {error}")


def _scan(opened: OpenParquet, source: ShardSource, findings: Findings) -> Iterator[Member]:
    parquet, reader = opened.parquet, source.reader
    columns = image_columns(parquet, source.media)
    row_counts = _row_counts(parquet)
    is_far = not storage_of(source.path).is_local
    with_paths = {column.name: column.has_path for column in columns}
    others = OtherColumns(opened.held_by(reader) if is_far else opened, with_paths, findings, source.lists)
    if source.refused:
        raise ValueError(source.refused)
    groups = range(parquet.metadata.num_row_groups)
    others.check(group for group in groups if group not in row_counts)
    images = _Images(parquet, columns, row_counts, source)
    keys: set[str] = set()
    number = group = 0
    try:
        for group, num_rows in row_counts.items():
            ranges = others.ranges(group) if is_far else []
            reader.hold(ranges)
            of_group = images.read(group)
            end = min(max((end for _, end in ranges), default=0), images.end)
            reader.skip(max(end - reader.position, 0))
            for row, other in enumerate(others.rows(group, num_rows)):
                number += 1
                of_row = [of[row] for of in of_group]
                yield from row_members(number - 1, other, columns, of_row, keys, findings, source.are_chats)
    except MemoryError:
        raise
    except UNREADABLE as error:
        if is_of_storage(error) or (refusal := _refusal(others, groups[group:])) is None:
            raise
        if number:
            raise RefusedShardError(refusal) from error
        source.pages.clear()
        raise ValueError(refusal) from error
    reader.hold([])
    images.report(findings)


def _refusal(others: OtherColumns, groups: Iterable[int]) -> str | None:
    """Why no row of the file is used; None where the pages of these row groups can be walked.

    The rows before such a row group could be used. But once all pages were walked before the first row was read, and
    the fingerprint of such a file stays that of a file without rows.
    """
    try:
        others.check(groups)
    except ValueError as error:
        return str(error)
    return None


class _Images:
    """Reads the columns of images of a file, a row group at a time."""

    def __init__(
        self,
        parquet: pq.ParquetFile,
        columns: Sequence[ImageColumn],
        row_counts: Mapping[int, int],
        source: ShardSource,
    ) -> None:
        """Find their chunks. Raises ValueError where these cannot be read."""
        self._parquet = parquet
        self._columns = columns
        self._row_counts = row_counts
        self._media = source.media
        self._size = source.reader.size
        self._seen, self._num_others = [False] * len(columns), [0] * len(columns)
        self._reader = ChunkReader(source.reader, source.pages, self._of_column)
        self._chunks = deque(_chunks(parquet, columns, row_counts, source.reader.size))
        self._found: dict[tuple[int, int], list[list[Value]]] = {}

    @property
    def end(self) -> int:
        """Where the next column of images begins, or the file ends."""
        return self._chunks[0].start if self._chunks else self._size

    def read(self, group: int) -> list[list[list[Value]]]:
        """Return the values of each row of a row group, by column."""
        num_rows = self._row_counts[group]
        wanted = [(group, number) for number, column in enumerate(self._columns) if column.leaf >= 0]
        while any(one not in self._found for one in wanted):  # in the order of the file, whatever that is
            chunk = self._chunks.popleft()
            values = self._reader.read(chunk)
            self._found[chunk.group, chunk.column] = values.rows(self._row_counts[chunk.group])
        return [
            self._found.pop((group, n)) if column.leaf >= 0 else [[without_bytes(self._parquet, column)]] * num_rows
            for n, column in enumerate(self._columns)
        ]

    def report(self, findings: Findings) -> None:
        """Add what was seen in columns of images besides these."""
        for column, was_seen, count in zip(self._columns, self._seen, self._num_others, strict=True):
            if not (column.is_image or was_seen):
                findings.add("", UNUSABLE_COLUMN, f"{column.name}: a column of bytes that are no images")
            elif count:
                findings.add("", ODD_VALUES, f"{column.name}: a column of images with {count} values that are none")

    def _of_column(self, chunk: Chunk) -> ReadImage:
        number, column = chunk.column, self._columns[chunk.column]
        expected = ENDINGS[column.ending]

        def read(content: bytes, address: int) -> Value:
            modality = media_of(content, self._media)
            if not column.is_image and modality is None:
                self._num_others[number] += bool(content)
                return None
            self._seen[number] = True
            try:
                return (modality or expected).read(content, address)
            except SampleError as error:
                return SampleError(error.kind, f"{column.name}: {error.detail}")

        return read


def _row_counts(parquet: pq.ParquetFile) -> dict[int, int]:
    """Rows of each row group that has any. Raises ValueError where they are too many."""
    counts = [parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups)]
    num_rows = sum(counts)
    if min(counts, default=0) < 0 or num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows, limit {MAX_ROWS}; split the file")
    return {group: count for group, count in enumerate(counts) if count}


def image_columns(parquet: pq.ParquetFile, media: Media = ONLY_IMAGES) -> list[ImageColumn]:
    """The columns that hold the bytes of images, and what else is served, in the order of the schema.

    Raises ValueError where a file has too many.
    """
    if len(parquet.schema) > MAX_LEAVES:
        raise ValueError(f"{len(parquet.schema)} columns, limit {MAX_LEAVES}; drop some")
    leaves = {parquet.schema.column(n).path: n for n in range(len(parquet.schema))}
    found = []
    for field in parquet.schema_arrow:
        column, path = _image_column(field, media)
        if column is None or path is None:
            found += [column] if column is not None else []
            continue
        inner = "".join(f".{part}" for part in path)
        prefix = f"{field.name}."
        names = [name for name in leaves if name == field.name + inner or (column.is_list and name.startswith(prefix))]
        names = [name for name in names if not path or name.endswith(inner)]
        if len(names) == 1 and parquet.schema.column(leaves[names[0]]).max_repetition_level == int(column.is_list):
            element_def = int(field.nullable) + 1 if column.is_list else 0
            found.append(replace(column, leaf=leaves[names[0]], element_def=element_def))
    return found[:MAX_IMAGE_COLUMNS]


def image_columns_of(schema: pa.Schema, media: Media) -> list[ImageColumn]:
    """The columns of a table in memory that hold the bytes of images, and of what else is served, in order.

    Their `leaf` has no meaning but its sign.
    """
    found = [_image_column(field, media)[0] for field in schema]
    return [column for column in found if column is not None][:MAX_IMAGE_COLUMNS]


def _image_column(field: pa.Field, media: Media) -> tuple[ImageColumn | None, tuple[str, ...] | None]:
    """The column of images that a field is, if it is one, and where the bytes are in an element, if it has any."""
    element, is_list = _element(field)
    path, has_path, is_image = _bytes_of(element)
    name = field.name.lower()
    ending = ending_of(name, media)
    if path is not None:
        is_image = is_image or name in IMAGE_NAMES or ending != IMAGES.ending
        return ImageColumn(field.name, is_list, has_path, is_image, 0, 0, ending), path
    named = name in MUST_BE_IMAGES or ending != IMAGES.ending
    if named and (pa.types.is_struct(element) or is_text(element)):
        return ImageColumn(field.name, is_list, False, True, -1, 0, ending), None
    return None, None


def ending_of(name: str, media: Media) -> str:
    """What names of members end in that a column holds, by the name of the column in lower case."""
    return next((modality.ending for modality in media if name in _NAMES.get(modality.ending, ())), IMAGES.ending)


def without_bytes(parquet: pq.ParquetFile, column: ImageColumn) -> SampleError:
    """Why a column named as one of images has none."""
    kind = parquet.schema_arrow.field(column.name).type
    held = f"column {column.name} holds no bytes, it is of type {str(kind)[:80]}"
    remedy = "write the images themselves into it, or name their files in a .jsonl" if column.is_list else ""
    return SampleError("missing_image", f"{held}; {remedy}" if remedy else held)


def _element(field: pa.Field) -> tuple[pa.DataType, bool]:
    is_list = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
    return (field.type.value_type if is_list else field.type), is_list


def _bytes_of(kind: pa.DataType) -> tuple[tuple[str, ...] | None, bool, bool]:
    """Where the bytes are in an element, whether a path stands beside them, and whether they must be an image's."""
    if _is_bytes(kind):
        return (), False, False
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        if "bytes" in fields and _is_bytes(fields["bytes"]):
            return ("bytes",), "path" in fields, True
    return None, False, False


def _is_bytes(kind: pa.DataType) -> bool:
    kind = without_dictionary(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _chunks(
    parquet: pq.ParquetFile, columns: Sequence[ImageColumn], row_counts: Mapping[int, int], num_bytes: int
) -> list[Chunk]:
    """The chunks of the columns in the order of the file. Raises ValueError where they overlap, leave it, or hold too
    much."""
    chunks = []
    num_values = 0
    for group, num_rows in row_counts.items():
        held = parquet.metadata.row_group(group)
        num_values += num_rows * len(columns)
        for number, column in enumerate(columns):
            if column.leaf < 0:
                continue
            chunks.append(_chunk(parquet, held.column(column.leaf), column, number, group))
            num_values += max(chunks[-1].num_values - num_rows, 0)
        if num_values > MAX_VALUES:
            raise ValueError(f"{num_values} values in columns of images, limit {MAX_VALUES}; split the file")
    chunks.sort(key=lambda chunk: chunk.start)
    ends = [len(MAGIC), *(end for chunk in chunks for end in (chunk.start, chunk.end)), num_bytes]
    if any(before > after for before, after in pairwise(ends)):
        raise ValueError("its footer gives columns that overlap each other or leave the file")
    return chunks


def _chunk(parquet: pq.ParquetFile, held: Any, column: ImageColumn, number: int, group: int) -> Chunk:
    if held.file_path:
        raise ValueError(f"{column.name} lies in another file, {held.file_path[:80]!a}")
    leaf = parquet.schema.column(column.leaf)
    start, end = chunk_bounds(held)
    return Chunk(
        column=number,
        group=group,
        start=start,
        end=end,
        num_values=held.num_values,
        codec=held.compression,
        max_def=leaf.max_definition_level,
        max_rep=leaf.max_repetition_level,
        element_def=column.element_def,
    )
