"""All other images, by Pillow: PNG, palettes, CMYK, transparency, animations, and what is broken."""

import io

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from dataserver.dataset import sniff_format
from dataserver.preprocessing.codecs.errors import InvalidImageError
from dataserver.preprocessing.codecs.ordinary import webp_size
from dataserver.preprocessing.codecs.patches import U8


def decode_with_pillow(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8:
    """Decode any image that Pillow reads; arguments and result as of `ordinary.decode`.

    Raises:
        InvalidImageError: its format is unknown, or its size is another one.
        Exception: whatever Pillow raises.
    """
    with _open(data, size) as image:
        if isinstance(image, JpegImageFile):
            image.draft(None, least)
        image.load()
        return np.array(
            _opaque(image)
        )  # a copy, which can be written to as all others: loops are compiled for either kind


def _open(data: bytes, size: tuple[int, int]) -> ImageFile:
    """Open an image that is stored with `size` (width, height) pixels, without decoding it.

    Plugins are used directly: `Image.open` tries all formats and compares sizes with mutable globals of Pillow.

    Raises:
        InvalidImageError: its format is unknown, or its size is another one.
    """
    image: ImageFile
    match sniff_format(data):
        case "jpeg":
            image = JpegImageFile(io.BytesIO(data))
        case "png":
            image = PngImageFile(io.BytesIO(data))
        case "webp":
            # opening allocates the canvas, so its size is compared first
            _check_size(webp_size(data), size)
            image = WebPImageFile(io.BytesIO(data))
        case _:
            raise InvalidImageError("neither JPEG, PNG nor WebP")
    _check_size(image.size, size)
    return image


def _check_size(found: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    if found is None:
        raise InvalidImageError("a WebP that begins with no image")
    if found != expected:
        raise InvalidImageError(f"it is {found[0]} x {found[1]} pixels, the index has {expected[0]} x {expected[1]}")


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image as RGB, on white where it is transparent."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")
