"""The values of one column chunk: images, each with its address, found in one pass over the pages.

Pages that are stored plain are read as a tar's members are. Compressed ones are decompressed if they are small, and
their values have addresses in the table of pages. Sizes are compared with what holds them before memory is taken.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

import numpy as np

from dataserver.dataset.errors import SampleError
from dataserver.dataset.kinds import CORRUPT_PARQUET, NEEDS_CONVERT
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES
from dataserver.dataset.shards.pages import (
    CODECS,
    FRAGMENT,
    MAX_FRAGMENTED_BYTES,
    MAX_PAGE_BYTES,
    MAX_VALUE_PAGE_BYTES,
    PACKED,
    STORED,
    Page,
    unpack,
)
from dataserver.dataset.shards.parquet.levels import I64, decode_hybrid
from dataserver.dataset.shards.parquet.page_header import (
    DATA_PAGE,
    DATA_PAGE_V2,
    DICTIONARY_INDEXES,
    DICTIONARY_PAGE,
    PageHeader,
    read_page_header,
)
from dataserver.dataset.shards.parquet.snappy import Fragment, fragments
from dataserver.dataset.shards.parquet.zstd import stored_blocks
from dataserver.dataset.shards.parts import Value

PLAIN: Final = 0
ENCODINGS: Final = {5: "DELTA_BINARY_PACKED", 6: "DELTA_LENGTH_BYTE_ARRAY", 7: "DELTA_BYTE_ARRAY"}
MAX_LEVELS_BYTES: Final = 8 << 20
"""Bytes of the levels or the dictionary indexes of one page."""
MAX_PACKED_RATIO: Final = 2
"""What cannot be compressed becomes a little longer, by any codec."""
_FRAME_BYTES: Final = 1024
"""More than the header and the end of a compressed stream take."""
_CUT: Final[Mapping[str, Callable[[bytes, int], list[Fragment] | None]]] = {
    "SNAPPY": lambda packed, _: fragments(packed),
    "ZSTD": stored_blocks,
}
"""By codec: returns the parts of a page that are read one by one, or None."""
REMEDY: Final = "; rewrite the dataset as tars: dataserver convert SOURCE TARGET"

ReadImage = Callable[[bytes, int], Value]
"""Is given a value and its address."""


class PageError(SampleError):
    """The rest of a chunk cannot be read."""


class _Cursor(Protocol):
    """Bytes that are read one after the other."""

    @property
    def position(self) -> int: ...

    def read(self, length: int) -> bytes: ...

    def skip(self, length: int) -> bool: ...


@dataclass(slots=True)
class _Buffer:
    data: bytes
    position: int = 0

    def read(self, length: int) -> bytes:
        start, self.position = self.position, self.position + length
        return self.data[start : self.position]

    def skip(self, length: int) -> bool:
        self.position += length
        return False


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group, as the footer describes it."""

    column: int
    """Number among the columns of images."""
    group: int
    start: int
    end: int
    num_values: int
    codec: str
    max_def: int
    max_rep: int
    element_def: int
    """Definition level, in a column of lists, from which on there is an element."""


@dataclass(slots=True)
class ChunkValues:
    """What was found in a chunk: levels of all slots, and the values of those that are not null."""

    chunk: Chunk
    values: list[Value] = field(default_factory=list)
    reps: list[I64] = field(default_factory=list)
    defs: list[I64] = field(default_factory=list)
    num_slots: int = 0
    error: PageError | None = None
    """Why the slots after these were not read."""

    def rows(self, num_rows: int) -> list[list[Value]]:
        """Return the values of each row; None stands for a null, or for what claims to be no image.

        Rows that were not read have the error alone.
        """
        defs = np.concatenate([*self.defs, np.zeros(0, np.int64)])
        reps = np.concatenate([*self.reps, np.zeros(0, np.int64)])
        bounds = [*np.flatnonzero(reps == 0).tolist(), defs.size]
        count = len(bounds) - 1
        if self.error is None and (count != num_rows or bounds[0] != 0):
            self.error = PageError(CORRUPT_PARQUET, f"{count} rows in the pages, {num_rows} in the footer")
            count = 0
        elif self.error is not None and self.chunk.max_rep:
            count = max(count - 1, 0)  # the last list may go on
        is_value = (defs == self.chunk.max_def).tolist()
        is_element = (defs >= self.chunk.element_def).tolist()
        values = iter(self.values)
        rows: list[list[Value]] = []
        for start, end in pairwise(bounds[: count + 1]):
            slots = [n for n in range(start, end) if is_element[n]]
            rows.append([next(values) if is_value[n] else None for n in slots])
        if self.error is not None:
            rows = rows[:num_rows] + [[self.error]] * (num_rows - len(rows))
        return rows


class ChunkReader:
    """Reads the chunks of a shard in the order in which they lie."""

    def __init__(self, reader: HashingReader, pages: list[Page], read_image: Callable[[Chunk], ReadImage]) -> None:
        self._reader = reader
        self._pages = pages
        self._next_address = reader.size
        self._read_image = read_image

    def read(self, chunk: Chunk) -> ChunkValues:
        """Read a chunk; the reader is at its end then."""
        found = ChunkValues(chunk)
        reader = self._reader
        reader.skip(chunk.start - reader.position)
        run = _ChunkRun(self._read_image(chunk), found)
        try:
            while found.num_slots < chunk.num_values:
                header = self._header(chunk)
                end = reader.position + header.packed_bytes
                if end > chunk.end:
                    raise PageError(CORRUPT_PARQUET, f"a page declares {header.packed_bytes} bytes beyond its column")
                self._page(run, header, end)
                reader.skip(end - reader.position)
        except PageError as error:
            where = f"row group {chunk.group}, page before byte {reader.position}"
            found.error = PageError(error.kind, f"{where}: {error.detail}")
        except ValueError as error:
            where = f"row group {chunk.group}, page before byte {reader.position}"
            found.error = PageError(CORRUPT_PARQUET, f"{where}: {error}")
        reader.skip(max(chunk.end - reader.position, 0))
        return found

    def _header(self, chunk: Chunk) -> PageHeader:
        header, length = read_page_header(self._reader.peek, chunk.end - self._reader.position)
        self._reader.skip(length)
        return header

    def _page(self, run: "_ChunkRun", header: PageHeader, end: int) -> None:
        if header.kind not in (DATA_PAGE, DATA_PAGE_V2, DICTIONARY_PAGE) or not header.num_values:
            return
        reader, chunk = self._reader, run.found.chunk
        if header.num_values > chunk.num_values - run.found.num_slots:
            raise PageError(CORRUPT_PARQUET, f"{header.num_values} values, fewer are left of {chunk.num_values}")
        if header.kind == DICTIONARY_PAGE:
            run.begin_dictionary()
        if header.kind == DATA_PAGE_V2:
            if header.rep_bytes + header.def_bytes > end - reader.position:
                raise PageError(CORRUPT_PARQUET, "its levels run past its end")
            run.levels(header, reader, header.rep_bytes, header.def_bytes)
        if chunk.codec == "UNCOMPRESSED" or not header.is_compressed:
            run.body(header, reader, end, 0)
            return
        plain_bytes = header.plain_bytes - header.rep_bytes - header.def_bytes
        offset = reader.position
        has_values = header.encoding == PLAIN or header.kind == DICTIONARY_PAGE
        reason = _unfit(header, chunk.codec, plain_bytes, end - offset)
        may_be_cut = chunk.codec in _CUT and has_values and 0 <= plain_bytes <= MAX_FRAGMENTED_BYTES
        may_be_cut = may_be_cut and end - offset <= MAX_PACKED_RATIO * (plain_bytes + _FRAME_BYTES)
        if reason and not may_be_cut:
            run.unread(header, reason)
            return
        packed = reader.read(end - offset)
        parts = _CUT[chunk.codec](packed, plain_bytes) if may_be_cut else None
        if reason and parts is None:
            run.unread(header, reason)
            return
        buffer = _Buffer(unpack(packed, plain_bytes, chunk.codec))
        run.body(header, buffer, plain_bytes, self._next_address)
        if has_values:
            self._pages += _stored_pages(offset, packed, plain_bytes, chunk.codec, parts)
            self._next_address += plain_bytes


def _stored_pages(
    offset: int, packed: bytes, plain_bytes: int, codec: str, parts: Sequence[Fragment] | None
) -> list[Page]:
    """What the table of pages says of a compressed page: its parts where they can be read one by one, else itself."""
    if parts is None:
        return [Page(offset, len(packed), plain_bytes, CODECS.index(codec))]
    return [
        Page(
            offset + part.start,
            part.packed_bytes,
            part.plain_bytes,
            CODECS.index(STORED if part.is_stored else FRAGMENT),
        )
        for part in parts
    ]


def _unfit(header: PageHeader, codec: str, plain_bytes: int, packed_bytes: int) -> str:
    """Say why a compressed page is not read; nothing where it is."""
    if codec not in PACKED:
        return f"a page is compressed with {codec}"
    limit = MAX_LEVELS_BYTES
    if header.encoding == PLAIN or header.kind == DICTIONARY_PAGE:
        limit = MAX_PAGE_BYTES if header.num_values > 1 else MAX_VALUE_PAGE_BYTES
    if not 0 <= plain_bytes <= limit:
        return f"a page of {plain_bytes} bytes is compressed with {codec}, limit {limit}"
    if packed_bytes > MAX_PACKED_RATIO * (plain_bytes + _FRAME_BYTES):
        return f"a page of {plain_bytes} bytes takes {packed_bytes}, compressed with {codec}"
    return ""


class _ChunkRun:
    """Puts the pages of one chunk together."""

    def __init__(self, read_image: ReadImage, found: ChunkValues) -> None:
        self._read_image = read_image
        self.found = found
        self._dictionary: list[Value] = []
        self._has_dictionary = False
        self._levels = np.zeros((2, 0), np.int64)
        """Levels of the page that is read."""

    def _add(self, values: list[Value]) -> None:
        """Take a page whose values were all read."""
        reps, defs = self._levels
        self.found.reps.append(reps)
        self.found.defs.append(defs)
        self.found.num_slots += len(reps)
        self.found.values += values

    @property
    def _num_present(self) -> int:
        return int(np.count_nonzero(self._levels[1] == self.found.chunk.max_def))

    def begin_dictionary(self) -> None:
        """Refuse a second one: each costs as much work as a whole column, whatever few bytes it is compressed to."""
        if self._has_dictionary:
            raise PageError(CORRUPT_PARQUET, "a second dictionary in one column")
        self._has_dictionary = True

    def levels(self, header: PageHeader, cursor: _Cursor, rep_bytes: int, def_bytes: int) -> None:
        """Read the levels of a page."""
        if max(rep_bytes, def_bytes) > MAX_LEVELS_BYTES:
            raise PageError(CORRUPT_PARQUET, f"levels of {max(rep_bytes, def_bytes)} bytes, limit {MAX_LEVELS_BYTES}")
        chunk, count = self.found.chunk, header.num_values
        reps = decode_hybrid(cursor.read(rep_bytes), chunk.max_rep.bit_length(), count)
        self._levels = np.stack([reps, decode_hybrid(cursor.read(def_bytes), chunk.max_def.bit_length(), count)])

    def unread(self, header: PageHeader, reason: str) -> None:
        """Note a page whose values cannot be reached one by one."""
        chunk, count = self.found.chunk, header.num_values
        missing = SampleError(NEEDS_CONVERT, f"row group {chunk.group}: {reason}{REMEDY}")
        if header.kind == DICTIONARY_PAGE:
            self._dictionary = [missing] * count
            return
        if header.kind == DATA_PAGE:
            if chunk.max_rep:  # nobody knows how many rows these are
                raise PageError(NEEDS_CONVERT, reason + REMEDY)
            self._levels = np.array([[0] * count, [chunk.max_def] * count], np.int64)
        self._add([missing] * self._num_present)

    def body(self, header: PageHeader, cursor: _Cursor, end: int, base: int) -> None:
        """Read a page that lies plain between a cursor and `end`; the address of position 0 is `base`."""
        if header.kind == DICTIONARY_PAGE:
            self._dictionary = self._all_plain(header.num_values, cursor, end, base)
            return
        if header.kind == DATA_PAGE:
            chunk = self.found.chunk
            parts = [_stated(cursor, end) if level else b"" for level in (chunk.max_rep, chunk.max_def)]
            self.levels(header, _Buffer(b"".join(parts)), *map(len, parts))
        count = self._num_present
        if header.encoding == PLAIN:
            self._add(self._all_plain(count, cursor, end, base))
        elif header.encoding in DICTIONARY_INDEXES:
            self._add(self._of_dictionary(cursor, end, count))
        else:
            name = ENCODINGS.get(header.encoding, str(header.encoding))
            reason = f"row group {self.found.chunk.group}: values are encoded as {name}{REMEDY}"
            missing = SampleError(NEEDS_CONVERT, reason)
            self._add([missing] * count)

    def _all_plain(self, count: int, cursor: _Cursor, end: int, base: int) -> list[Value]:
        """Read values one after the other up to `end`."""
        if 4 * count > end - cursor.position:
            raise PageError(CORRUPT_PARQUET, f"it declares {count} values in {end - cursor.position} bytes")
        values = [self._plain(cursor, end, base) for _ in range(count)]
        if cursor.position != end:
            raise PageError(CORRUPT_PARQUET, f"its {count} values end {end - cursor.position} bytes before it does")
        return values

    def _plain(self, cursor: _Cursor, end: int, base: int) -> Value:
        """Read one value: 4 bytes of its length, and the bytes."""
        left = end - cursor.position - 4
        length = int.from_bytes(cursor.read(4), "little") if left >= 0 else 0
        if left < length:
            raise PageError(CORRUPT_PARQUET, f"a value of {length} bytes runs past its page")
        if length > MAX_MEMBER_BYTES:
            cursor.skip(length)
            return SampleError("image_too_large", f"{length} bytes, limit {MAX_MEMBER_BYTES}")
        address = base + cursor.position
        content = cursor.read(length)
        if len(content) < length:
            raise PageError(CORRUPT_PARQUET, f"the file ends within a value of {length} bytes")
        return self._read_image(content, address)

    def _of_dictionary(self, cursor: _Cursor, end: int, count: int) -> list[Value]:
        num_bytes = end - cursor.position
        if num_bytes > MAX_LEVELS_BYTES:
            raise PageError(CORRUPT_PARQUET, f"dictionary indexes of {num_bytes} bytes, limit {MAX_LEVELS_BYTES}")
        data = cursor.read(num_bytes)
        if not count:
            return []
        if not data:
            raise PageError(CORRUPT_PARQUET, "its dictionary indexes are missing")
        indexes = decode_hybrid(data[1:], data[0], count)
        if int(indexes.max()) >= len(self._dictionary):
            raise PageError(CORRUPT_PARQUET, f"index {indexes.max()} in a dictionary of {len(self._dictionary)}")
        return [self._dictionary[index] for index in indexes.tolist()]


def _stated(cursor: _Cursor, end: int) -> bytes:
    """Read levels behind 4 bytes that state their length."""
    left = end - cursor.position - 4
    length = int.from_bytes(cursor.read(4), "little") if left >= 0 else 0
    if not 0 <= length <= min(left, MAX_LEVELS_BYTES):
        raise PageError(CORRUPT_PARQUET, f"its levels declare {length} bytes")
    return cursor.read(length)
