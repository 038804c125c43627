"""All other images, by Pillow: PNG, palettes, CMYK, transparency, animations, and what is broken."""

import io
from typing import Final

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from dataserver.images.errors import InvalidImageError
from dataserver.images.formats import format_of, none_of_them
from dataserver.images.patches import U8

_WIDENED: Final = {"L;2": (0x03, 0x55), "L;4": (0x0F, 0x11)}
"""How PNGs store grey that Pillow widens to 8 bits, but not the grey that is transparent: its bits, and the factor."""
_DEEP: Final = "RGB;16B"
"""Two bytes for a channel; Pillow takes the first, the high one."""
_LOW_BYTES: Final = "RGB;16L"
"""Two bytes for a channel; Pillow takes the second, the low one."""


def decode(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8:
    """Decode any image that Pillow reads; arguments and result as of `jpeg_decoder.decode`.

    Raises:
        InvalidImageError: its format is unknown, or its size is another one.
        Exception: whatever Pillow raises.
    """
    with _open(data, size) as image:
        if isinstance(image, JpegImageFile):
            image.draft(None, least)
        stored_as = image.tile[0].args if image.tile and "transparency" in image.info else None
        image.load()
        if isinstance(stored_as, str) and stored_as in _WIDENED:
            bits, factor = _WIDENED[stored_as]
            image.info["transparency"] = (image.info["transparency"] & bits) * factor
        if stored_as == _DEEP:
            return _opaque_deep(image, data, image.info["transparency"])
        return np.array(
            _opaque(image)
        )  # a copy, which can be written to as all others: loops are compiled for either kind


def _open(data: bytes, size: tuple[int, int]) -> ImageFile:
    """Open an image that is stored with `size` (width, height) pixels, without decoding it.

    Plugins are used directly: `Image.open` tries all formats and compares sizes with mutable globals of Pillow.

    Raises:
        InvalidImageError: its format is unknown, or its size is another one.
    """
    found = format_of(data)
    if found is None:
        raise InvalidImageError(none_of_them(data))
    if found.refusal is not None and (reason := found.refusal(data)):
        raise InvalidImageError(reason)
    if found.canvas_size is not None:
        _check_size(found.canvas_size(data), size)
    image = found.load_plugin()(io.BytesIO(data))
    _check_size(image.size, size)
    if found.modes and image.mode not in found.modes:
        raise InvalidImageError(f"its pixels are {image.mode}")
    if found.without_turn is not None:
        found.without_turn(image)
    return image


def _check_size(found: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    if found is None:
        raise InvalidImageError("it begins with no image")
    if found != expected:
        raise InvalidImageError(f"it is {found[0]} x {found[1]} pixels, the index has {expected[0]} x {expected[1]}")


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image as RGB, on white where it is transparent."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.asarray(image)
        high: U8 = (grey >> 8).astype(np.uint8)
        if "transparency" in image.info:
            high[grey == image.info["transparency"]] = 255
        return Image.fromarray(high).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


def _opaque_deep(image: Image.Image, data: bytes, transparent: tuple[int, int, int]) -> U8:
    """The pixels of a PNG of 16 bits a channel, white where all bits are those of the transparent colour.

    Args:
        image: as Pillow decodes it, to the high bytes.
        data: the encoded image, which is decoded once more, to the low bytes.
        transparent: of 16 bits each.
    """
    with _open(data, image.size) as low:
        low.tile = [tile._replace(args=_LOW_BYTES) for tile in low.tile]
        low.load()
        is_transparent = np.ones((image.height, image.width), np.bool_)
        for channel, value in enumerate(transparent):
            is_transparent &= np.asarray(image.getchannel(channel)) == value >> 8
            is_transparent &= np.asarray(low.getchannel(channel)) == value & 0xFF
    pixels: U8 = np.array(image)
    pixels[is_transparent] = 255
    return pixels
