"""Zstandard streams cut between their blocks (RFC 8878), so that it is known how much becomes of each piece.

The library decompresses all that it is given at once: a few bytes may stand for 128 KiB, and a megabyte of such for
gigabytes.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

MAGIC: Final = b"\x28\xb5\x2f\xfd"
BLOCK_BYTES: Final = 128 << 10
"""What a block becomes, at most."""
_READ_BYTES: Final = 1 << 20
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)
_SIZE_BYTES: Final = (0, 2, 4, 8)
_RUN: Final = 1
"""The type of a block that is one byte, many times."""


class _Buffer:
    """Bytes that were read and not yet given away."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self.data = bytearray()
        self.is_end = False

    def has(self, length: int) -> bool:
        """Read until there are so many bytes; False where the file ends before."""
        while len(self.data) < length and not self.is_end:
            more = self._read(_READ_BYTES)
            self.is_end = not more
            self.data += more
        return len(self.data) >= length


def zstd_pieces(read: Callable[[int], bytes], max_made: int) -> Iterator[bytes]:
    """Yield a compressed file in pieces that become at most `max_made` bytes each.

    What is no such stream comes in pieces of a few bytes, whatever it is: the library says what is wrong with it.

    Args:
        read: reads up to so many bytes.
        max_made: a multiple of `BLOCK_BYTES`.
    """
    buffer = _Buffer(read)
    while buffer.has(1):
        header = _frame_header(buffer)
        if header is None:
            yield from _rest(buffer)
            return
        num_blocks, is_last, piece = 0, header.is_skippable, header.num_bytes
        while not is_last:
            if not buffer.has(piece + 3):
                yield from _rest(buffer)
                return
            head = int.from_bytes(buffer.data[piece : piece + 3], "little")
            is_last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
            piece += 3 + (1 if kind == _RUN else size)
            num_blocks += 1
            if not buffer.has(piece) or size > BLOCK_BYTES:
                yield from _rest(buffer)
                return
            if num_blocks * BLOCK_BYTES >= max_made and not is_last:
                yield _taken(buffer, piece)
                piece = num_blocks = 0
        yield _taken(buffer, piece + (4 if header.has_checksum else 0))


class _Header(NamedTuple):
    """How long a frame's header is, or a whole skippable frame."""

    num_bytes: int
    has_checksum: bool
    is_skippable: bool


def _frame_header(buffer: _Buffer) -> _Header | None:
    """Read the header of the next frame; None where there is none."""
    if not buffer.has(8):
        return None
    if buffer.data[1:4] == b"\x2a\x4d\x18" and buffer.data[0] >> 4 == 5:
        length = 8 + int.from_bytes(buffer.data[4:8], "little")
        return _Header(length, False, True) if length <= _READ_BYTES and buffer.has(length) else None
    if buffer.data[:4] != MAGIC:
        return None
    flags = buffer.data[4]
    is_single = bool(flags & 0x20)
    size_bytes = _SIZE_BYTES[flags >> 6] or int(is_single)
    length = 5 + (not is_single) + _DICTIONARY_BYTES[flags & 3] + size_bytes
    return _Header(length, bool(flags & 4), False)


def _taken(buffer: _Buffer, length: int) -> bytes:
    buffer.has(length)
    found = bytes(buffer.data[:length])
    del buffer.data[:length]
    return found


def _rest(buffer: _Buffer) -> Iterator[bytes]:
    """Yield all that is left, a little at a time."""
    while buffer.has(1):
        yield _taken(buffer, 64)
