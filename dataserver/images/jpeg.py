"""JPEG by segments: its size from the header, at a tenth of what Pillow takes; and a file whose data end too early.

Common is what Pillow is sure to open with the same result: segments one right after the other, one baseline or
progressive frame of 8 bits with one or three components, whole quantization tables, no EXIF. Pillow judges all others.
"""

import re
from typing import Final

from dataserver.images.truncation import Completed, Size

_SOI: Final = b"\xff\xd8"
_SKIPPED: Final = frozenset({0xC4, 0xDD, 0xFE, *range(0xE3, 0xED)})
"""Huffman tables, restart intervals, comments, and application segments that Pillow ignores."""
_FRAMES: Final = frozenset({0xC0, 0xC1, 0xC2})
_QUANTIZATION: Final = 0xDB
_SCAN: Final = 0xDA
_END: Final = 0xD9
_MARKER: Final = re.compile(rb"\xff+[^\xff]")
_MARKER_IN_SCAN: Final = re.compile(rb"\xff+[^\xff\x00\xd0-\xd7]")
"""0xFF within a scan may stand before a stuffed zero, or a restart."""
_TABLE_BYTES: Final = 65
_APPLICATIONS: Final = {0xE0: (b"JFIF\0", 14), 0xE2: (b"ICC_PROFILE\0", 14), 0xEE: (b"Adobe", 12)}
"""Application segments that Pillow reads: how the usual one begins, and its least length."""


def upright_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a common JPEG; None for anything else."""
    if data[:2] != _SOI:
        return None
    size, at, end = None, 2, len(data)
    while at + 4 <= end and data[at] == 0xFF:
        marker, start = data[at + 1], at + 4
        length = (data[at + 2] << 8 | data[at + 3]) - 2
        at = start + length
        if length < 0 or at > end:
            return None
        if marker == _SCAN:
            return size
        if marker in _FRAMES and size is None:
            size = _frame(data, start, length)
            if size is None:
                return None
        elif not (marker in _SKIPPED or _is_known(data, marker, start, length)):
            return None
    return None


def _frame(data: bytes, start: int, length: int) -> tuple[int, int] | None:
    """Width and height that a frame of 8 bits gives, if it is common."""
    if length < 6 or data[start] != 8 or data[start + 5] not in (1, 3) or length != 6 + 3 * data[start + 5]:
        return None
    height, width = data[start + 1] << 8 | data[start + 2], data[start + 3] << 8 | data[start + 4]
    return (width, height) if width and height else None


def _is_known(data: bytes, marker: int, start: int, length: int) -> bool:
    """Whether Pillow is sure to be content with a segment that it reads."""
    if marker == _QUANTIZATION:  # of 8 bits each
        return length % _TABLE_BYTES == 0 and not any(data[i] >> 4 for i in range(start, start + length, _TABLE_BYTES))
    begin, least = _APPLICATIONS.get(marker, (b"", -1))
    return 0 <= least <= length and data.startswith(begin, start)


def is_whole(data: bytes) -> bool:
    """Whether a file goes on to its end marker, for which Pillow asks only where rows lack."""
    return _walk(data)[2]


def complete(data: bytes, size: Size) -> Completed | None:
    """Put an end marker behind a file whose data end too early; None where it has one, or no scan.

    Of what lacks, libjpeg makes blocks of uniform grey; in a later scan of a progressive file it leaves them as they
    are.
    """
    del size
    end, has_scan, whole = _walk(data)
    return Completed(data[:end] + b"\xff\xd9", ()) if has_scan and not whole else None


def _walk(data: bytes) -> tuple[int, bool, bool]:
    """Return where the last segment or scan ends that is not cut within its header, whether there is a scan, and
    whether an end marker follows."""
    at, has_scan = 2, False
    while found := (_MARKER_IN_SCAN if has_scan else _MARKER).search(data, at):
        at, marker = found.start(), data[found.end() - 1]
        if marker == _END:
            return found.end(), has_scan, True
        end = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
        if found.end() + 2 > len(data) or end > len(data):
            return at, has_scan, False
        has_scan |= marker == _SCAN
        at = end
    return len(data), has_scan, False
