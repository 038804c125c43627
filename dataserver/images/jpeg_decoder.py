"""JPEG of 8 bits, decoded by libjpeg-turbo."""

from typing import Final

import numpy as np
import simplejpeg

from dataserver.images.errors import InvalidImageError
from dataserver.images.kernels.jpeg import look_at_jpeg
from dataserver.images.limits import MAX_SCANNED_PIXELS
from dataserver.images.patches import U8
from dataserver.images.scratch import scratch

COMPONENTS: Final = {"Gray": 1, "YCbCr": 3, "RGB": 3}
"""Components of each pixel, by the colour spaces that libjpeg converts to RGB."""


def decode(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8 | None:
    """Decode a JPEG; None where it is of another kind, or where libjpeg-turbo finds anything wrong with it.

    Args:
        data: the encoded image, within the limits.
        size: stored (width, height) according to the index.
        least: (width, height) that suffice; the image may come at 1/2, 1/4 or 1/8 of its size if that covers them.

    Returns:
        uint8 [height, width, 3]; the next call of this thread may overwrite it.

    Raises:
        InvalidImageError: it has more scans than there is time for.
    """
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
        buffer = scratch("decoded", height * width * 3)
        pixels: U8 = simplejpeg.decode_jpeg(data, min_width=width, min_height=height, buffer=buffer)
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
