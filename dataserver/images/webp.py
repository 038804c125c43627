"""The size of a WebP from its header (RFC 9649)."""

from typing import Final

_FRAME: Final = 30
"""Bytes to the end of a frame's size: RIFF and chunk headers, the frame's tag, its start code, both sides."""


def upright_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a lossy key frame and nothing else, which Pillow is sure to open; None for anything else."""
    if len(data) < _FRAME or data[8:16] != b"WEBPVP8 " or data[23:26] != b"\x9d\x01\x2a":
        return None
    tag, size = int.from_bytes(data[20:23], "little"), int.from_bytes(data[16:20], "little")
    whole = int.from_bytes(data[4:8], "little") + 8 == len(data) == _FRAME - 10 + size + size % 2
    shown_key_frame = not tag & 1 and tag >> 1 & 7 <= 3 and tag >> 4 & 1 and tag >> 5 < size
    width, height = (int.from_bytes(data[i : i + 2], "little") & 0x3FFF for i in (26, 28))
    return (width, height) if whole and shown_key_frame and width and height else None


def canvas_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of the canvas (RFC 9649, sections 2.5 to 2.7); None where it begins with no image."""

    def number(first: int, length: int) -> int:
        return int.from_bytes(data[first : first + length], "little")

    match data[12:16]:
        case b"VP8X":
            return number(24, 3) + 1, number(27, 3) + 1
        case b"VP8L":
            return (number(21, 4) & 0x3FFF) + 1, (number(21, 4) >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            return number(26, 2) & 0x3FFF, number(28, 2) & 0x3FFF
    return None
