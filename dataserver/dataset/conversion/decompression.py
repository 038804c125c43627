"""Compressed tars as they were: a stream of bytes, bounded in memory, that is never taken for whole where it is cut."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import zstandard

from dataserver.dataset.conversion.zstd_frames import ZstdFrames
from dataserver.dataset.errors import DatasetError

READ_BYTES: Final = 1 << 20
MADE_BYTES: Final = 256 << 10
"""What is decompressed at a time, at most: it stays in a processor's cache until it is written."""
MAX_WINDOW_BYTES: Final = 256 << 20
"""Memory of an xz stream, whose header names it; `xz -9` needs 65 MiB. Zstandard allows 128 MiB by itself."""
MAX_RATIO: Final = 1000
MAX_FREE_BYTES: Final = 1 << 30
"""Less than this is decompressed at any ratio."""

COMPRESSIONS: Final[Mapping[str, Callable[[], Any]]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": zstandard.ZstdDecompressor,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES),
}
"""Decompressors of one stream by the end of a name behind `.tar`. Several streams may follow each other. The one of
Zstandard is not used."""
_ERRORS: Final = (zlib.error, zstandard.ZstdError, OSError, lzma.LZMAError, EOFError, ValueError)


class Readable(Protocol):
    """A file, as far as it is read here."""

    def read(self, length: int, /) -> bytes:
        """Read up to so many bytes; nothing at the end."""


def decompressed(file: Readable, compression: str, name: str) -> Iterator[bytes]:
    """Yield the bytes of a compressed file.

    Args:
        file: at its first byte.
        compression: a key of `COMPRESSIONS`.
        name: for messages.

    Raises:
        DatasetError: it is damaged or cut, or becomes more than `MAX_RATIO` times as long.
        OSError: storage failed.
    """
    counted = _Counted(file)
    num_made = 0
    for made in _zstd(counted, name) if compression == ".zst" else _streams(counted, compression, name):
        num_made += len(made)
        if num_made > max(MAX_FREE_BYTES, MAX_RATIO * counted.num_bytes):
            raise DatasetError(f"{name} becomes more than {MAX_RATIO} times as long; unpack it yourself if it is sane")
        yield made


class _Counted:
    """A file that counts what was read of it, and, of Zstandard, follows its frames."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        self.num_bytes = 0
        self.is_read = False
        """Whether the stream has been read to its end."""
        self.frames = ZstdFrames()

    def read(self, length: int) -> bytes:
        """Read up to so many bytes."""
        data = self._file.read(length)
        self.num_bytes += len(data)
        self.is_read = not data
        return data

    def read_frames(self, length: int) -> bytes:
        """Read up to so many bytes of Zstandard's frames. Raises ZstdError where more than zeros follow these."""
        data = self.read(length)
        num_bytes = self.frames.feed(data)
        if num_bytes == len(data):
            return data
        if data.count(0, num_bytes) != len(data) - num_bytes:
            raise zstandard.ZstdError("zeros between frames")
        return data[:num_bytes]


class _Frames:
    """What the library reads from."""

    def __init__(self, counted: _Counted) -> None:
        self.read = counted.read_frames


def _zstd(file: _Counted, name: str) -> Iterator[bytes]:
    """Yield what becomes of frames of Zstandard. The library ends quietly where a file is cut."""
    source: Any = _Frames(file)  # of a file, the library needs no more than that
    try:
        with zstandard.ZstdDecompressor().stream_reader(source, READ_BYTES, read_across_frames=True) as reader:
            while made := reader.read(MADE_BYTES):
                yield made
        while not file.is_read:  # zeros behind the last frame
            file.read_frames(READ_BYTES)
    except zstandard.ZstdError as error:
        raise _damaged(name, file, error) from error
    if not file.frames.is_whole:
        raise _cut(name, file)


def _streams(file: _Counted, compression: str, name: str) -> Iterator[bytes]:
    """Yield what becomes of streams that follow each other."""
    stream, seen, begun = COMPRESSIONS[compression](), False, False
    while data := file.read(READ_BYTES):
        while data and (begun or data.strip(b"\0")):  # zeros may fill up the last block
            seen = begun = True
            try:
                yield from _made(stream, data)
            except _ERRORS as error:
                raise _damaged(name, file, error) from error
            data = b""
            if stream.eof:
                begun, data, stream = False, stream.unused_data, COMPRESSIONS[compression]()
    if begun or not seen:
        raise _cut(name, file)


def _made(stream: Any, data: bytes) -> Iterator[bytes]:
    """Yield what a stream makes of more bytes, `MADE_BYTES` at a time."""
    while True:
        made = stream.decompress(data, MADE_BYTES)
        if made:  # readers take nothing for the end
            yield made
        data = getattr(stream, "unconsumed_tail", b"")
        if stream.eof or (len(made) < MADE_BYTES and not data):
            return


def _damaged(name: str, file: _Counted, error: Exception) -> DatasetError:
    remedy = "copy it again, or unpack it yourself"
    return DatasetError(f"{name} is damaged before byte {file.num_bytes}, or needs too much memory ({error}); {remedy}")


def _cut(name: str, file: _Counted) -> DatasetError:
    return DatasetError(f"{name} is cut: no compressed stream ends before byte {file.num_bytes}; copy it again")
