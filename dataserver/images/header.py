"""Image headers: format by magic, true upright size and EXIF orientation, without decoding a pixel."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataserver.images.errors import ImageHeaderError
from dataserver.images.formats import ORIENTATION_TAG, ImageFormat, format_of, none_of_them
from dataserver.images.limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from dataserver.images.patches import TRANSPOSED

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a header says: `width`, `height` upright (EXIF orientation applied), `orientation` 1..8."""

    format: str
    width: int
    height: int
    orientation: int


def read_header(data: bytes) -> ImageHeader:
    """Read the header of an image.

    Raises:
        ImageHeaderError: `unreadable_header`, or `image_too_large` where the declared size is over the limits.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageHeaderError("image_too_large", f"{len(data)} bytes, limit {MAX_IMAGE_BYTES}")
    found = format_of(data)
    if found is None:
        raise ImageHeaderError("unreadable_header", none_of_them(data))
    if found.upright_size is not None and (size := found.upright_size(data)) is not None:
        _check_pixels(*size)
        return ImageHeader(found.name, *size, 1)
    if found.refusal is not None and (reason := found.refusal(data)):
        raise ImageHeaderError("unreadable_header", f"{found.title}: {reason}")
    with _open(found, data) as image:
        if found.modes and image.mode not in found.modes:
            raise ImageHeaderError("unreadable_header", f"a {found.title} of pixels that are {image.mode}; convert it")
        width, height = image.size  # above zero, or Pillow does not open it
        _check_pixels(width, height)
        orientation = _orientation(found, data, image)
    if orientation in TRANSPOSED:
        width, height = height, width
    return ImageHeader(found.name, width, height, orientation)


def _open(found: ImageFormat, data: bytes) -> "ImageFile":
    try:
        return found.load_plugin()(io.BytesIO(data))
    except MemoryError:
        raise
    except Exception as error:  # hostile bytes make a third-party parser raise nearly anything
        raise ImageHeaderError("unreadable_header", f"{type(error).__name__}: {error}") from error


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageHeaderError("image_too_large", f"declares {width} x {height} pixels, limit {MAX_IMAGE_PIXELS}")


def _orientation(found: ImageFormat, data: bytes, image: "ImageFile") -> int:
    """Return the orientation as Pillow's `exif_transpose` sees it: of the EXIF data, a PNG's raw profile, or the XMP.

    It is 1 where there is none or it is damaged.
    """
    from PIL import Image

    if found.is_turned(image):
        return 1
    try:
        if found.without_pixels is not None:
            image = _open(found, found.without_pixels(data))
        value = Image.Image.getexif(image).get(ORIENTATION_TAG, 1)  # that of the plugin for PNG decodes the pixels
    except MemoryError:
        raise
    except Exception:  # as in _open; damaged EXIF data does not make an image unusable
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1
