"""The images that nearly all are: 8-bit JPEG and still, opaque WebP, decoded without Pillow."""

from typing import Final, cast

import cv2
import numpy as np
import simplejpeg

from dataserver.dataset import sniff_format
from dataserver.preprocessing.codecs.errors import InvalidImageError
from dataserver.preprocessing.codecs.patches import U8
from dataserver.preprocessing.codecs.scratch import scratch
from dataserver.preprocessing.kernels.jpeg import look_at_jpeg
from dataserver.preprocessing.limits import MAX_SCANNED_PIXELS

COMPONENTS: Final = {"Gray": 1, "YCbCr": 3, "RGB": 3}
"""Of the colours that libjpeg makes RGB of."""
_ANIMATED_OR_TRANSPARENT: Final = 0x12
"""Flags of an extended WebP (RFC 9649, section 2.7)."""
_TRANSPARENT_LOSSLESS: Final = 1 << 28
"""Bit of the header of a lossless WebP, behind two sides of 14 bits (RFC 9649, section 3.4)."""

# Images are decoded side by side already; a pool of OpenCV's own would only take cores from that.
cv2.setNumThreads(1)


def decode_ordinary(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8 | None:
    """Decode an ordinary image; None where it is none, or where its decoder finds anything wrong with it.

    Args:
        data: the encoded image, within the limits.
        size: stored (width, height) according to the index.
        least: (width, height) that suffice; a JPEG may come at 1/2, 1/4 or 1/8 of its size if that covers them.

    Returns:
        uint8 [height, width, 3]; the next call of this thread may overwrite it.

    Raises:
        InvalidImageError: it has more scans than there is time for.
    """
    match sniff_format(data):
        case "jpeg":
            return _jpeg(data, size, least)
        case "webp" if _plain_webp(data):
            return _webp(data, size)
    return None


def _jpeg(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8 | None:
    most = MAX_SCANNED_PIXELS // max(1, size[0] * size[1])
    scans, width, height, components = look_at_jpeg(np.frombuffer(data, np.uint8), most)
    if scans > most:
        raise InvalidImageError(f"{scans} scans of {size[0] * size[1]} pixels")
    try:
        if not components:
            height, width, colour, _ = simplejpeg.decode_jpeg_header(data)
            components = COMPONENTS.get(colour, 0)
        if (width, height) != size or components not in COMPONENTS.values():
            return None
        width, height = _reduced(size, least)
        # It takes the smallest size of at least these, and writes it to the front of the buffer.
        room = scratch("decoded", height * width * 3)
        pixels: U8 = simplejpeg.decode_jpeg(data, min_width=width, min_height=height, buffer=room)
        return pixels
    except ValueError:  # it is strict: data that libjpeg warns of are errors too
        return None


def _reduced(size: tuple[int, int], least: tuple[int, int]) -> tuple[int, int]:
    """The (width, height) at the smallest of the scales 1/1, 1/2, 1/4, 1/8 that covers `least`.

    The scales between them, which libjpeg also has, take longer than a whole decode.
    """
    width, height = size
    for scale in (8, 4, 2):
        if -(-width // scale) >= least[0] and -(-height // scale) >= least[1]:
            return -(-width // scale), -(-height // scale)
    return size


def _plain_webp(data: bytes) -> bool:
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


def _webp(data: bytes, size: tuple[int, int]) -> U8 | None:
    if webp_size(data) != size:
        return None
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:  # such as a lack of memory
        return None
    return cast(U8, pixels) if pixels is not None and pixels.shape[1::-1] == size else None


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Return (width, height) of a WebP canvas (RFC 9649, sections 2.5 to 2.7); None where it begins with no image."""

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
