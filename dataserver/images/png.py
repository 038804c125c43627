"""PNG by chunks (W3C PNG, third edition): what stands around the pixels, and a file whose data end too early."""

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from dataserver.images.truncation import Completed, Size

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Values of a pixel, by colour type."""
_ABOUT: Final = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})
"""Chunks that may hold an orientation."""
_WHOLE: Final = ((0, 0, 1, 1),)
_ADAM7: Final = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row, and the steps to the next ones, of each pass."""
_AT_ONCE: Final = 1 << 20
"""Bytes that are inflated at a time."""
_FED_AT_ONCE: Final = 1 << 16
"""Bytes of a stream that are given to zlib at a time: it copies what it does not take."""
_HEADER: Final = struct.Struct(">IIBBBBB")


class Chunk(NamedTuple):
    """A chunk; `end` lies beyond the file where the chunk is cut."""

    kind: bytes
    begin: int
    """Offset at which the chunk's content begins."""
    end: int
    """Where the chunk ends, with its checksum."""


def chunks(data: bytes) -> Iterator[Chunk]:
    """Yield the chunks of a file up to IEND, or to the one that is cut."""
    at = len(SIGNATURE)
    while at + 8 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        yield Chunk(data[at + 4 : at + 8], at + 8, end)
        if data[at + 4 : at + 8] == b"IEND":
            return
        at = end


def is_whole(data: bytes) -> bool:
    """Whether a file goes on to the end of its IEND chunk."""
    return any(chunk.kind == b"IEND" and chunk.end <= len(data) for chunk in chunks(data))


def without_pixels(data: bytes) -> bytes:
    """A PNG of its header and of whatever may hold an orientation, before and behind the pixels, and of no pixels."""
    found = [SIGNATURE]
    for chunk in chunks(data):
        if (chunk.kind == b"IHDR" or chunk.kind in _ABOUT) and chunk.end <= len(data):
            found.append(data[chunk.begin - 8 : chunk.end])
    return b"".join([*found, _chunk(b"IEND", b"")])


def complete(data: bytes, size: Size) -> Completed | None:
    """Fill a file whose data end too early with rows of zeros; None where it is whole, damaged, or has no pixels.

    Args:
        data: the file.
        size: (width, height) that it must have.
    """
    if is_whole(data):
        return None
    found = list(chunks(data))
    if not found or found[0].kind != b"IHDR" or found[0].end > len(data):
        return None
    if found[0].end - 4 - found[0].begin < _HEADER.size:
        return None
    width, height, depth, colour, _, _, interlaced = _HEADER.unpack_from(data, found[0].begin)
    first = next((i for i, chunk in enumerate(found) if chunk.kind == b"IDAT"), None)
    if (width, height) != size or first is None or colour not in _CHANNELS:
        return None
    pixels = b"".join(data[c.begin : min(c.end - 4, len(data))] for c in found[first:] if c.kind == b"IDAT")
    passes = _ADAM7 if interlaced else _WHOLE
    try:
        stream, missing = _filled(pixels, size, depth * _CHANNELS[colour], passes)
    except zlib.error:
        return None
    whole = data[: found[first].begin - 8] + _chunk(b"IDAT", stream) + _chunk(b"IEND", b"")
    return Completed(whole, missing)


def _filled(
    pixels: bytes, size: Size, bits: int, passes: tuple[tuple[int, int, int, int], ...]
) -> tuple[bytes, tuple[tuple[slice, slice], ...]]:
    """Return a stream of all rows, with zeros for rows that are missing or cut, and where pixels are missing."""
    shapes = [(max(0, -(-(size[0] - x) // across)), max(0, -(-(size[1] - y) // down))) for x, y, across, down in passes]
    row_sizes = [1 + (columns * bits + 7) // 8 if columns else 0 for columns, _ in shapes]
    most = sum(rows * row_bytes for (_, rows), row_bytes in zip(shapes, row_sizes, strict=True))
    present = sum(map(len, _inflated(pixels, most + 1)))  # beyond the last row, so that the checksum is compared
    taken, total = 0, 0
    missing: list[tuple[slice, slice]] = []
    for (x, y, across, down), (_, rows), row_bytes in zip(passes, shapes, row_sizes, strict=True):
        if not rows * row_bytes:
            continue
        there = min(rows, max(0, present - total) // row_bytes)
        taken, total = taken + there * row_bytes, total + rows * row_bytes
        if there < rows:
            missing.append((slice(y + there * down, None, down), slice(x, None, across)))
    packer = zlib.compressobj(1)
    parts = [packer.compress(part) for part in _inflated(pixels, taken)]
    for at in range(taken, total, _AT_ONCE):
        parts.append(packer.compress(bytes(min(_AT_ONCE, total - at))))
    return b"".join([*parts, packer.flush()]), tuple(missing)


def _inflated(stream: bytes, most: int) -> Iterator[bytes]:
    """Yield what a stream holds, as far as it goes, up to so many bytes. Raises zlib.error where it is damaged."""
    unpacker = zlib.decompressobj()
    for at in range(0, len(stream), _FED_AT_ONCE):
        fed = stream[at : at + _FED_AT_ONCE]
        while most > 0 and not unpacker.eof and (part := unpacker.decompress(fed, min(_AT_ONCE, most))):
            yield part
            most -= len(part)
            fed = unpacker.unconsumed_tail
        if most <= 0 or unpacker.eof:
            return


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
