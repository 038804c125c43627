"""Compressed pages of a shard: values in them have addresses behind the last byte of the file.

An address below the size of the shard is an offset in it. From there on all pages that hold values follow each other
as they are decompressed, in the order of the table. So a value has one offset and one length, wherever it lies.
"""

import threading
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from dataserver.varints import CutError, read_varint, varint

MAX_PAGE_BYTES: Final = 2 << 20
"""Largest decompressed page of several values: each value costs a whole page where the cache has lost it."""

MAX_FRAGMENTED_BYTES: Final = 256 << 20
"""Largest page whose parts can be read one by one; it is decompressed whole when it is indexed."""

MAX_VALUE_PAGE_BYTES: Final = (64 << 20) + 64
"""Largest page of a single value, with its length and levels."""

_MAX_REUSED_WINDOW: Final = 2 * MAX_PAGE_BYTES
_AHEAD_BYTES: Final = 160 << 10
"""A block of ZSTD is 128 KiB at most, and some parts of a page become shorter than others."""

FRAGMENT: Final = "SNAPPY fragment"
STORED: Final = "stored"
PACKED: Final = ("SNAPPY", "ZSTD", "GZIP")
"""Codecs that tell whether a page is as long as it says."""
CODECS: Final = (*PACKED, FRAGMENT, STORED)
"""Names of codecs by their number in a table: of pages, and of the parts of SNAPPY and ZSTD pages, which are pages of
their own there."""


class Page(NamedTuple):
    """One compressed page; its fields are the columns of a stored table."""

    offset: int
    """First byte in the shard."""
    packed_bytes: int
    plain_bytes: int
    codec: int
    """Compression of the page, as its position in `CODECS`."""


class PageTable:
    """Finds the page of an address."""

    def __init__(self, pages: Sequence[Page], shard_bytes: int) -> None:
        self.pages = pages
        sizes = np.array([page.plain_bytes for page in pages], np.int64)
        self._starts: npt.NDArray[np.int64] = shard_bytes + np.cumsum(sizes) - sizes

    def find(self, address: int) -> tuple[int, int]:
        """Return the number of the page and the position in it. Raises IndexError where there is none."""
        number = int(np.searchsorted(self._starts, address, "right")) - 1
        if number < 0:
            raise IndexError(address)
        return number, address - int(self._starts[number])


def encode_pages(pages: Sequence[Page]) -> bytes:
    """The pages as an index holds them: little-endian int64 [pages, 4]."""
    return np.array(pages, "<i8").reshape(-1, len(Page._fields)).tobytes()


def decode_pages(data: bytes, shard_bytes: int) -> PageTable:
    """Read what `encode_pages` wrote for a shard of so many bytes. Raises ValueError where it is none of this."""
    rows = np.frombuffer(data, "<i8").reshape(-1, len(Page._fields))
    pages = [Page(*row) for row in rows.tolist()]
    for page in pages:
        inside = 0 <= page.offset <= page.offset + page.packed_bytes <= shard_bytes
        if not inside or not 0 <= page.plain_bytes <= MAX_VALUE_PAGE_BYTES or not 0 <= page.codec < len(CODECS):
            raise ValueError(f"it has a page that no shard has: {page}")
    return PageTable(pages, shard_bytes)


def unpack(data: bytes, plain_bytes: int, codec: str) -> bytes:
    """Decompress a page. Raises ValueError where it is damaged or has another length; never returns stale memory."""
    if codec == FRAGMENT:
        return unpack(varint(plain_bytes) + data, plain_bytes, "SNAPPY")
    try:
        if not plain_bytes and not data:  # parquet-java writes no stream at all where a page has nulls alone
            return b""
        if codec == "GZIP":
            stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
            found = stream.decompress(data, plain_bytes + 1)
            if not stream.eof:
                raise ValueError("it has another length, or is cut")
        else:
            import pyarrow as pa

            if codec == "SNAPPY" and _snappy_length(data) != plain_bytes:  # Arrow would leave the rest as it was
                raise ValueError("it has another length")
            found = pa.decompress(data, plain_bytes, codec.lower(), asbytes=True)
    except (zlib.error, OSError, ValueError) as error:  # Arrow's are one of the two
        raise ValueError(f"a page cannot be decompressed: {error}") from error
    if len(found) != plain_bytes:
        raise ValueError(f"a page of {plain_bytes} bytes has another length")
    return found


class _OfThread(threading.local):
    """What each thread has one of: it takes the memory of a window of `_MAX_REUSED_WINDOW` at most."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor(max_window_size=_MAX_REUSED_WINDOW)


_of_thread: Final = _OfThread()


def begin_bytes(page: Page, num_bytes: int) -> int:
    """How much of a stored page is likely to hold its first bytes: blocks of it are decompressed whole."""
    return min(page.packed_bytes, page.packed_bytes * num_bytes // max(page.plain_bytes, 1) + _AHEAD_BYTES)


def unpack_begin(data: bytes, num_bytes: int, codec: str) -> bytes:
    """Decompress the first bytes of a page of ZSTD or GZIP. Raises ValueError where it is damaged or shorter."""
    if not num_bytes:  # which zlib takes for no limit
        return b""
    try:
        if codec == "GZIP":
            found = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, num_bytes)
        else:
            is_small = zstandard.get_frame_parameters(data).window_size <= _MAX_REUSED_WINDOW
            stream = _of_thread.zstd if is_small else zstandard.ZstdDecompressor()
            with stream.stream_reader(data, read_across_frames=True) as reader:
                found = reader.read(num_bytes)
    except (zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"a page cannot be decompressed: {error}") from error
    if len(found) != num_bytes:
        raise ValueError(f"a page of at least {num_bytes} bytes is shorter")
    return found


def _snappy_length(data: bytes) -> int:
    """What a block says that it is decompressed: a varint of at most 5 bytes; -1 where it is none."""
    try:
        return read_varint(data[:5], 0)[0]
    except CutError:
        return -1
