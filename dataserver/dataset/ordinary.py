"""The size of an ordinary JPEG or WebP from its header, at a tenth of what Pillow takes to open it.

Ordinary is what Pillow is sure to open with the same result. A JPEG: segments one right after the other, one baseline
or progressive frame of 8 bits with one or three components, whole quantization tables, no EXIF. A WebP: one lossy key
frame and nothing else. Anything else is Pillow's to judge.
"""

from typing import Final

_WEBP_FRAME: Final = 30
"""Bytes to the end of a frame's size: RIFF and chunk headers, the frame's tag, its start code, both sides."""
_SOI: Final = b"\xff\xd8"
_SKIPPED: Final = frozenset({0xC4, 0xDD, 0xFE, *range(0xE3, 0xED)})
"""Huffman tables, restart intervals, comments, and application segments of which Pillow takes no notice."""
_FRAMES: Final = frozenset({0xC0, 0xC1, 0xC2})
_QUANTIZATION: Final = 0xDB
_SCAN: Final = 0xDA
_TABLE_BYTES: Final = 65
_APPLICATIONS: Final = {0xE0: (b"JFIF\0", 14), 0xE2: (b"ICC_PROFILE\0", 14), 0xEE: (b"Adobe", 12)}
"""Application segments that Pillow reads: how the ordinary one begins, and its least length."""


def ordinary_webp(data: bytes) -> tuple[int, int] | None:
    """Width and height of an ordinary WebP; None for anything else."""
    if len(data) < _WEBP_FRAME or data[8:16] != b"WEBPVP8 " or data[23:26] != b"\x9d\x01\x2a":
        return None
    tag, size = int.from_bytes(data[20:23], "little"), int.from_bytes(data[16:20], "little")
    whole = int.from_bytes(data[4:8], "little") + 8 == len(data) == _WEBP_FRAME - 10 + size + size % 2
    shown_key_frame = not tag & 1 and tag >> 1 & 7 <= 3 and tag >> 4 & 1 and tag >> 5 < size
    width, height = (int.from_bytes(data[i : i + 2], "little") & 0x3FFF for i in (26, 28))
    return (width, height) if whole and shown_key_frame and width and height else None


def ordinary_jpeg(data: bytes) -> tuple[int, int] | None:
    """Width and height of an ordinary JPEG; None for anything else."""
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
    """Width and height that a frame of 8 bits gives, if it is ordinary."""
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
