"""Image headers: format by magic, true upright size and EXIF orientation, without decoding a pixel."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dataserver.dataset.errors import SampleError
from dataserver.dataset.ordinary import ordinary_jpeg, ordinary_webp

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

MAX_IMAGE_BYTES: Final = 64 << 20
MAX_IMAGE_PIXELS: Final = 1 << 27
"""Width x height of one image, 0.4 GB of RGB. It lies below the 178,956,970 pixels at which some of Pillow's readers
refuse an image of their own accord, so no version of Pillow decides."""

FORMATS: Final = ("jpeg", "png", "webp")
"""Image formats; an index stores the position in this tuple."""

ORIENTATION_TAG: Final = 0x0112
TRANSPOSED: Final = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap width and height."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a header says: `width`, `height` upright (EXIF orientation applied), `orientation` 1..8."""

    format: str
    width: int
    height: int
    orientation: int


def sniff_format(data: bytes) -> str | None:
    """Tell JPEG, PNG and WebP by their magic; None for anything else."""
    if data[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return None


def open_image(data: bytes) -> "ImageFile":
    """Open an image with the plugin its magic names; no pixel is decoded.

    The plugin is used directly because `Image.open` compares the size with a mutable module global of Pillow.

    Raises:
        SampleError: `unreadable_header`.
    """
    # Only here: Pillow takes 10 ms to load, and a server that opens indexes reads no header.
    from PIL.ImageFile import ImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    plugins: dict[str | None, type[ImageFile]] = {"jpeg": JpegImageFile, "png": PngImageFile, "webp": WebPImageFile}
    plugin = plugins.get(sniff_format(data))
    if plugin is None:
        raise SampleError("unreadable_header", f"neither JPEG, PNG nor WebP: starts with {data[:8].hex()}")
    try:
        return plugin(io.BytesIO(data))
    except MemoryError:
        raise
    except Exception as error:  # hostile bytes make a third-party parser raise nearly anything
        raise SampleError("unreadable_header", f"{type(error).__name__}: {error}") from error


def read_header(data: bytes) -> ImageHeader:
    """Read the header of a JPEG, PNG or WebP image.

    Raises:
        SampleError: `unreadable_header`, or `image_too_large` where the declared size is over the limits.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise SampleError("image_too_large", f"{len(data)} bytes, limit {MAX_IMAGE_BYTES}")
    image_format = sniff_format(data)
    if (size := _ordinary_size(image_format, data)) is not None:
        _check_pixels(*size)
        return ImageHeader(str(image_format), *size, 1)
    with open_image(data) as image:
        width, height = image.size  # above zero, or Pillow does not open it
        _check_pixels(width, height)
        orientation = _orientation(image)
    if orientation in TRANSPOSED:
        width, height = height, width
    return ImageHeader(str(image_format), width, height, orientation)


def _ordinary_size(image_format: str | None, data: bytes) -> tuple[int, int] | None:
    """Width and height of an image that Pillow need not be asked about."""
    if image_format == "jpeg":
        return ordinary_jpeg(data)
    return ordinary_webp(data) if image_format == "webp" else None


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_IMAGE_PIXELS:
        raise SampleError("image_too_large", f"declares {width} x {height} pixels, limit {MAX_IMAGE_PIXELS}")


def _orientation(image: "ImageFile") -> int:
    """Return the EXIF orientation, 1 where there is none or it is damaged.

    `image.getexif()` is not used: for PNG it decodes the pixels.
    """
    from PIL import Image

    raw = image.info.get("exif")
    if not isinstance(raw, bytes):
        return 1
    exif = Image.Exif()
    try:
        exif.load(raw)
        value = exif.get(ORIENTATION_TAG, 1)
    except MemoryError:
        raise
    except Exception:  # as in open_image; damaged EXIF data does not make an image unusable
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1
