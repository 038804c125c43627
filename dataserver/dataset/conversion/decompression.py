"""Compressed tars as they were: a stream of bytes, bounded in memory, that is never taken for whole where it is cut."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import BufferedIOBase
from typing import Any, Final

import zstandard

from dataserver.dataset.conversion.zstd_blocks import zstd_pieces
from dataserver.dataset.errors import DatasetError

READ_BYTES: Final = 1 << 20
MADE_BYTES: Final = 1 << 20
"""What is decompressed at a time, at most."""
MAX_WINDOW_BYTES: Final = 256 << 20
"""Memory of an xz stream, whose header names it; `xz -9` needs 65 MiB. Zstandard allows 128 MiB by itself."""
MAX_RATIO: Final = 1000
MAX_FREE_BYTES: Final = 1 << 30
"""Less than this is decompressed at any ratio."""

COMPRESSIONS: Final[Mapping[str, Callable[[], Any]]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES),
}
"""By the end of a name behind `.tar`: makes one stream; several may follow each other."""
_ERRORS: Final = (zlib.error, zstandard.ZstdError, OSError, lzma.LZMAError, EOFError, ValueError)


def decompressed(file: BufferedIOBase, compression: str, name: str) -> Iterator[bytes]:
    """Yield the bytes of a compressed file.

    Args:
        file: at its first byte.
        compression: a key of `COMPRESSIONS`.
        name: for messages.

    Raises:
        DatasetError: it is damaged or cut, or becomes more than `MAX_RATIO` times as long.
        OSError: storage failed.
    """
    stream, seen, begun, num_read, num_made = COMPRESSIONS[compression](), False, False, 0, 0
    pieces = zstd_pieces(file.read, MADE_BYTES) if compression == ".zst" else iter(lambda: file.read(READ_BYTES), b"")
    for data in pieces:
        num_read += len(data)
        while data and (begun or data.strip(b"\0")):  # zeros may fill up the last block
            seen = begun = True
            for made in _made(stream, data, compression, f"{name} is damaged before byte {num_read}"):
                num_made += len(made)
                if num_made > max(MAX_FREE_BYTES, MAX_RATIO * num_read):
                    raise DatasetError(
                        f"{name} becomes more than {MAX_RATIO} times as long; unpack it yourself if it is sane"
                    )
                yield made
            data = b""
            if stream.eof:
                begun, data, stream = False, stream.unused_data, COMPRESSIONS[compression]()
    if begun or not seen:
        raise DatasetError(f"{name} is cut: no compressed stream ends before byte {num_read}; copy it again")


def _made(stream: Any, data: bytes, compression: str, damaged: str) -> Iterator[bytes]:
    """Yield what a stream makes of more bytes, `MADE_BYTES` at a time. Raises DatasetError where it is damaged."""
    try:
        if compression == ".zst":  # the library has no such limit: pieces are cut so that little becomes of each
            yield stream.decompress(data)
            return
        while True:
            made = stream.decompress(data, MADE_BYTES)
            yield made
            data = getattr(stream, "unconsumed_tail", b"")
            if stream.eof or (len(made) < MADE_BYTES and not data):
                return
    except _ERRORS as error:
        remedy = "copy it again, or unpack it yourself"
        raise DatasetError(f"{damaged}, or needs too much memory ({error}); {remedy}") from error
