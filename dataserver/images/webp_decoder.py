"""Still, opaque WebP, decoded by libwebp through OpenCV."""

from typing import Final, cast

import cv2
import numpy as np

from dataserver.images.patches import U8
from dataserver.images.webp import canvas_size

_ANIMATED_OR_TRANSPARENT: Final = 0x12
"""Flags of an extended WebP (RFC 9649, section 2.7)."""
_TRANSPARENT_LOSSLESS: Final = 1 << 28
"""Bit for transparency in the header of a lossless WebP, after two sides of 14 bits (RFC 9649, section 3.4)."""

# Images are decoded side by side already; a pool of OpenCV's own would only take cores from that.
cv2.setNumThreads(1)


def decode(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8 | None:
    """Decode a still, opaque WebP; arguments and result as of `jpeg_decoder.decode`, but always of its whole size."""
    del least
    if not _is_plain(data) or canvas_size(data) != size:
        return None
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:  # such as a lack of memory
        return None
    return cast(U8, pixels) if pixels is not None and pixels.shape[1::-1] == size else None


def _is_plain(data: bytes) -> bool:
    """Whether a WebP is complete, still and opaque."""
    if len(data) < 30 or int.from_bytes(data[4:8], "little") + 8 > len(data):
        return False
    match data[12:16]:
        case b"VP8 ":
            return True
        case b"VP8L":
            return not int.from_bytes(data[21:25], "little") & _TRANSPARENT_LOSSLESS
        case b"VP8X":
            return not data[20] & _ANIMATED_OR_TRANSPARENT
    return False
