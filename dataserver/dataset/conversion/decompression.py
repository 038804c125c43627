"""Compressed tars as they were: a stream of bytes, bounded in memory, that is never taken for whole where it is cut."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import BufferedIOBase
from typing import Final, Protocol

import zstandard

from dataserver.dataset.errors import DatasetError

READ_BYTES: Final = 8 << 10
"""At a time: what these can become is in memory, at most 256 MiB."""
MAX_WINDOW_BYTES: Final = 256 << 20
"""Memory of an xz stream, whose header names it; `xz -9` needs 65 MiB. Zstandard allows 128 MiB by itself."""
MAX_RATIO: Final = 1000
MAX_FREE_BYTES: Final = 1 << 30
"""Less than this is decompressed at any ratio."""


class _Stream(Protocol):
    """One compressed stream; several may follow each other."""

    @property
    def eof(self) -> bool:
        """Whether its end was seen."""

    @property
    def unused_data(self) -> bytes:
        """What lies behind its end."""

    def decompress(self, data: bytes, /) -> bytes:
        """Go on with more of it."""


COMPRESSIONS: Final[Mapping[str, Callable[[], _Stream]]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES),
}
"""By the end of a name behind `.tar`."""
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
    while data := file.read(READ_BYTES):
        num_read += len(data)
        while data and (begun or data.strip(b"\0")):  # zeros may fill up the last block
            seen = True
            try:
                made = stream.decompress(data)
            except _ERRORS as error:
                raise DatasetError(
                    f"{name} is damaged before byte {num_read}, or needs too much memory ({error}); copy it again, or"
                    " unpack it yourself"
                ) from error
            num_made += len(made)
            if num_made > max(MAX_FREE_BYTES, MAX_RATIO * num_read):
                raise DatasetError(
                    f"{name} becomes more than {MAX_RATIO} times as long; unpack it yourself if it is sane"
                )
            yield made
            begun, data = not stream.eof, b""
            if not begun:
                data, stream = stream.unused_data, COMPRESSIONS[compression]()
    if begun or not seen:
        raise DatasetError(f"{name} is cut: no compressed stream ends before byte {num_read}; copy it again")
