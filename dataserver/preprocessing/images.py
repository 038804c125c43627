"""From encoded images to patches: decode, scale to the patch grid, turn upright, cut.

The rules of content_version 1:

1. JPEG, PNG or WebP, told by magic; the first frame of an animation. The stored size must be the one in the index.
2. A JPEG is decoded at the smallest of the scales 1/1, 1/2, 1/4, 1/8 that still covers the grid.
3. 16-bit grey keeps its high byte; palettes, CMYK and bilevel images become RGB. Colour profiles are ignored.
4. Scaled to exactly (columns x patch, rows x patch), aspect not kept to the pixel: a box filter by whole factors, then
   Pillow's antialiased bicubic; with transparency on premultiplied colours, then composited on white.
5. Turned upright as its EXIF orientation says.

Whatever Pillow cannot read is invalid: truncated data, a size other than the index has, anything over the limits.
"""

import io
import logging
import warnings
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.Image import Resampling, Transpose
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from dataserver.dataset import TRANSPOSED, ImageRef, sniff_format
from dataserver.planning.jobspec import Sizing
from dataserver.preprocessing.limits import DECODER_BYTES_PER_PIXEL, MAX_ENCODED_BYTES, MAX_PIXELS, MAX_SCANNED_PIXELS

U8 = NDArray[np.uint8]
Box = tuple[float, float, float, float]

logger = logging.getLogger(__name__)

UPRIGHT: Final = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
"""What turns an image of each EXIF orientation upright; orientation 1 is upright."""

START_OF_SCAN: Final = b"\xff\xda"
REDUCING_GAP: Final = 1.0
"""Reduce by the largest whole factor before the bicubic filter: 25 % less time for large WebP, above 39 dB."""


class InvalidImageError(Exception):
    """These bytes are not a usable image; never leaves this module."""


@dataclass(frozen=True, slots=True)
class ImageShape:
    """What the index says of an image, and the patch grid that the plan gives it."""

    width: int
    """Pixels, upright."""
    height: int
    """Pixels, upright."""
    orientation: int
    """EXIF orientation, 1 to 8."""
    rows: int
    """Patches of the upright image, a multiple of `merge`."""
    columns: int
    """Patches of the upright image, a multiple of `merge`."""


def silence_pillow_warnings() -> None:
    """Drop Pillow's warnings in this process; a process that decodes calls it once, at its start.

    They come with texts that hostile files choose, and Python keeps every distinct one for the life of the process.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def decode_patches(data: bytes, shape: ImageShape, sizing: Sizing, out: U8) -> bool:
    """Decode an image into its patches, merge-block-major.

    Args:
        data: the encoded image.
        shape: its size according to the index, and its patch grid.
        sizing: side of a patch, and of a merge block.
        out: uint8 [rows * columns, patch * patch * 3], C-contiguous, overwritten.

    Returns:
        True; or False, with zeros in `out`, where `data` is not a usable image: a pure function of the arguments.

    Raises:
        ValueError: `out` or the grid does not fit the sizing.
        MemoryError: the machine, not the image, is at fault.
    """
    _check_target(shape, sizing, out)
    try:
        pixels = _decode(data, shape, sizing.patch)
    except InvalidImageError as error:
        logger.debug("an image of %d bytes cannot be decoded: %s", len(data), error)
        out.fill(0)
        return False
    write_patches(pixels, sizing, out)
    return True


def undecodable(data: bytes, image: ImageRef) -> str | None:
    """Say why servers would deliver an image as invalid; None where they deliver it.

    Raises:
        MemoryError: the machine, not the image, is at fault.
    """
    try:
        _decode(data, ImageShape(image.width, image.height, image.orientation, rows=1, columns=1), patch=1)
    except InvalidImageError as error:
        return str(error)
    return None


def write_patches(pixels: U8, sizing: Sizing, out: U8) -> None:
    """Cut uint8 [rows * patch, columns * patch, 3] into `out`, uint8 [rows * columns, patch * patch * 3].

    Patches come merge-block-major: blocks of merge x merge patches row by row, within a block row by row.
    """
    patch, merge = sizing.patch, sizing.merge
    height, width, _ = pixels.shape
    # One row of one patch moves as one element: half the time of single bytes.
    line = np.dtype((np.void, patch * 3))
    lines = pixels.reshape(height, width * 3).view(line)
    blocks = lines.reshape(height // (merge * patch), merge, patch, width // (merge * patch), merge)
    target = out.view(line).reshape(blocks.shape[0], blocks.shape[3], merge, merge, patch)
    target[...] = blocks.transpose(0, 3, 1, 4, 2)


def _check_memory(shape: ImageShape) -> None:
    """Raise MemoryError if a decoder could not have had the memory it needs.

    libjpeg and libwebp report a failed allocation like broken data, and that must not pass for a verdict on the image.
    """
    np.empty(shape.width * shape.height * DECODER_BYTES_PER_PIXEL, np.uint8)


def _check_target(shape: ImageShape, sizing: Sizing, out: U8) -> None:
    expected = (shape.rows * shape.columns, sizing.patch**2 * 3)
    if out.shape != expected or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(
            f"found an output of {out.dtype} {list(out.shape)} for {shape.rows} x {shape.columns} patches; "
            f"C-contiguous uint8 {list(expected)} is required"
        )
    if shape.rows < 1 or shape.columns < 1 or shape.rows % sizing.merge or shape.columns % sizing.merge:
        raise ValueError(
            f"found a grid of {shape.rows} x {shape.columns} patches; "
            f"positive multiples of merge {sizing.merge} are required"
        )
    if shape.orientation != 1 and shape.orientation not in UPRIGHT:
        raise ValueError(f"found EXIF orientation {shape.orientation}; 1 to 8 is required")


def _decode(data: bytes, shape: ImageShape, patch: int) -> U8:
    """Return uint8 [rows * patch, columns * patch, 3], C-contiguous.

    Raises:
        InvalidImageError: the bytes are not a usable image.
        MemoryError: the machine, not the image, is at fault.
    """
    try:
        return _decode_with_pillow(data, shape, patch)
    except (MemoryError, InvalidImageError):
        raise
    except Exception as error:  # hostile bytes make a third-party decoder raise nearly anything
        _check_memory(shape)
        raise InvalidImageError(f"{type(error).__name__}: {error}") from error


def _decode_with_pillow(data: bytes, shape: ImageShape, patch: int) -> U8:
    size, goal = (shape.width, shape.height), (shape.columns * patch, shape.rows * patch)
    if shape.orientation in TRANSPOSED:
        size, goal = size[::-1], goal[::-1]
    with _open(data, size) as image:
        draft = image.draft(None, goal) if isinstance(image, JpegImageFile) else None
        image.load()
        scaled = _plain(image).resize(goal, Resampling.BICUBIC, None if draft is None else draft[1], REDUCING_GAP)
    rgb = _opaque(scaled)
    if shape.orientation in UPRIGHT:
        rgb = rgb.transpose(UPRIGHT[shape.orientation])
    return np.asarray(rgb)


def _open(data: bytes, size: tuple[int, int]) -> ImageFile:
    """Open an image that is stored with `size` (width, height) pixels, without decoding it.

    Plugins are used directly: `Image.open` tries all formats and compares sizes with mutable globals of Pillow.

    Raises:
        InvalidImageError: it is over the limits, or its size is another one.
    """
    num_pixels = size[0] * size[1]
    if len(data) > MAX_ENCODED_BYTES or num_pixels > MAX_PIXELS:
        raise InvalidImageError(
            f"{len(data)} bytes and {num_pixels} pixels, limits {MAX_ENCODED_BYTES} and {MAX_PIXELS}"
        )
    image: ImageFile
    match sniff_format(data):
        case "jpeg":
            # 0xff 0xda occurs nowhere else in entropy-coded data; embedded thumbnails add one or two
            if num_pixels * data.count(START_OF_SCAN) > MAX_SCANNED_PIXELS:
                raise InvalidImageError(f"{data.count(START_OF_SCAN)} scans of {num_pixels} pixels")
            image = JpegImageFile(io.BytesIO(data))
        case "png":
            image = PngImageFile(io.BytesIO(data))
        case "webp":
            # opening allocates the canvas, so its size is compared first
            _check_size(_webp_size(data), size)
            image = WebPImageFile(io.BytesIO(data))
        case _:
            raise InvalidImageError("neither JPEG, PNG nor WebP")
    _check_size(image.size, size)
    return image


def _check_size(found: tuple[int, int], expected: tuple[int, int]) -> None:
    if found != expected:
        raise InvalidImageError(f"it is {found[0]} x {found[1]} pixels, the index has {expected[0]} x {expected[1]}")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) of a WebP canvas (RFC 9649, sections 2.5 to 2.7)."""

    def number(first: int, length: int) -> int:
        return int.from_bytes(data[first : first + length], "little")

    match data[12:16]:
        case b"VP8X":
            return number(24, 3) + 1, number(27, 3) + 1
        case b"VP8L":
            return (number(21, 4) & 0x3FFF) + 1, (number(21, 4) >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            return number(26, 2) & 0x3FFF, number(28, 2) & 0x3FFF
        case chunk:
            raise InvalidImageError(f"a WebP that begins with chunk {chunk!r}")


def _plain(image: Image.Image) -> Image.Image:
    """Return the image in a mode that can be scaled: L, RGB, LA or RGBA."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("LA", "RGBA"):
        return image
    if image.has_transparency_data:
        return image.convert("RGBA")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image as RGB, on white where it is transparent."""
    if image.mode in ("LA", "RGBA"):
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert("RGB")
