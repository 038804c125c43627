"""From encoded images to patches: decode, scale to the patch grid, turn upright, cut.

The rules of content_version 2:

1. JPEG, PNG or WebP, told by magic; the first frame of an animation. The stored size must be the one in the index.
2. Of quality `fast`, a JPEG is decoded at the smallest of the scales 1/1, 1/2, 1/4, 1/8 that still covers the grid; of
   quality `exact`, all images are decoded whole.
3. 16-bit grey keeps its high byte; palettes, CMYK and bilevel images become RGB; what is transparent lies on white,
   in PNGs also the one colour that is transparent, all of its bits. Colour profiles are ignored.
4. Scaled to exactly (columns x patch, rows x patch), aspect not kept to the pixel, by the filter of `scaling.py`.
5. Turned upright as its EXIF orientation says.

Where the job has `transforms`, an image is turned upright first, then transformed, then scaled.

A format's fast decoder (`formats`) comes first. What it refuses, warns of, or does not know goes to Pillow, and what
Pillow cannot read is invalid: truncated data, a size other than the index has, anything over the limits.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from dataserver.images.errors import InvalidImageError
from dataserver.images.formats import format_of
from dataserver.images.limits import DECODER_BYTES_PER_PIXEL, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from dataserver.images.patches import TRANSPOSED, U8, UPRIGHT, PixelOffsets, pixel_offsets, write_patches
from dataserver.images.transforms import DrawnTransform, enlarged, transform
from dataserver.planning.job.fields import Quality, Sizing

logger = logging.getLogger(__name__)

_BYTE: Final = np.dtype(np.uint8)


class ImageShape(NamedTuple):
    """What the index says of an image, and the patch grid that the plan gives it."""

    width: int
    """Pixels of a row, after the EXIF rotation."""
    height: int
    """Pixels of a column, after the EXIF rotation."""
    orientation: int
    """EXIF orientation, 1 to 8."""
    rows: int
    """Patches of the upright image, a multiple of `merge`."""
    columns: int
    """Patches of the upright image, a multiple of `merge`."""


class StoredImage(Protocol):
    """What the index says of an image."""

    @property
    def width(self) -> int:
        """Pixels, upright."""

    @property
    def height(self) -> int:
        """Pixels, upright."""

    @property
    def orientation(self) -> int:
        """EXIF orientation, 1 to 8."""


def silence_pillow_warnings() -> None:
    """Drop Pillow's warnings in this process; a process that decodes calls it once, at its start.

    They come with texts that hostile files choose, and Python keeps every distinct one for the life of the process.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def decode_patches(
    data: bytes, shape: ImageShape, sizing: Sizing, out: U8, drawn: Sequence[DrawnTransform] = ()
) -> bool:
    """Decode an image into its patches, merge-block-major.

    Args:
        data: the encoded image.
        shape: its size according to the index, and its patch grid.
        sizing: side of a patch, and of a merge block; quality.
        out: uint8 [rows * columns, patch * patch * 3], C-contiguous, overwritten.
        drawn: transforms of the upright image, before it is scaled.

    Returns:
        True; or False, with zeros in `out`, where `data` is not a usable image: a pure function of the arguments.

    Raises:
        ValueError: `out` or the grid does not fit the sizing.
        MemoryError: the machine, not the image, is at fault.
    """
    _check_target(shape, sizing, out)
    size = _as_stored(shape.width, shape.height, shape.orientation)
    goal = _as_stored(shape.columns * sizing.patch, shape.rows * sizing.patch, shape.orientation)
    try:
        pixels = _decode(data, size, enlarged(goal, drawn) if sizing.quality is Quality.FAST else size)
    except InvalidImageError as error:
        logger.debug("an image of %d bytes cannot be decoded: %s", len(data), error)
        out.fill(0)
        return False
    if drawn:
        pixels = np.ascontiguousarray(transform(UPRIGHT[shape.orientation](pixels), drawn))
        size, shape = pixels.shape[1::-1], shape._replace(orientation=1)
    _write_scaled(pixels, size, shape, sizing, out)
    return True


def _write_scaled(pixels: U8, size: tuple[int, int], shape: ImageShape, sizing: Sizing, out: U8) -> None:
    """Scale pixels, which are an image of `size` at one of its scales, and cut them."""
    if pixels.shape[1::-1] == _as_stored(shape.columns * sizing.patch, shape.rows * sizing.patch, shape.orientation):
        write_patches(UPRIGHT[shape.orientation](pixels), sizing, out)
    else:
        of = pixel_offsets(shape.rows, shape.columns, sizing.patch, sizing.merge, shape.orientation)
        _scaler()(pixels, size, of, out)


def undecodable(data: bytes, image: StoredImage) -> str | None:
    """Say why servers would deliver an image as invalid; None where they deliver it.

    Raises:
        MemoryError: the machine, not the image, is at fault.
    """
    try:
        _decode(data, _as_stored(image.width, image.height, image.orientation), (1, 1))
    except InvalidImageError as error:
        return str(error)
    return None


def _check_target(shape: ImageShape, sizing: Sizing, out: U8) -> None:
    expected = (shape.rows * shape.columns, sizing.patch**2 * 3)
    if out.shape != expected or out.dtype != _BYTE or not out.flags.c_contiguous:
        raise ValueError(
            f"found an output of {out.dtype} {list(out.shape)} for {shape.rows} x {shape.columns} patches; "
            f"C-contiguous uint8 {list(expected)} is required"
        )
    if shape.rows < 1 or shape.columns < 1 or shape.rows % sizing.merge or shape.columns % sizing.merge:
        raise ValueError(
            f"found a grid of {shape.rows} x {shape.columns} patches; "
            f"positive multiples of merge {sizing.merge} are required"
        )
    if shape.orientation not in UPRIGHT:
        raise ValueError(f"found EXIF orientation {shape.orientation}; 1 to 8 is required")


def _as_stored(width: int, height: int, orientation: int) -> tuple[int, int]:
    """The (width, height) of an upright image before it was turned."""
    return (height, width) if orientation in TRANSPOSED else (width, height)


def _decode(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8:
    """Decode an image that is stored with `size` (width, height) pixels; `least` suffice.

    Returns:
        uint8 [height, width, 3], C-contiguous, as it is stored; the next call of this thread may overwrite it.

    Raises:
        InvalidImageError: the bytes are not a usable image.
        MemoryError: the machine, not the image, is at fault.
    """
    _check_limits(data, size)
    pixels = decode_fast(data, size, least)
    return _decode_by_pillow(data, size, least) if pixels is None else pixels


def decode_fast(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8 | None:
    """Decode by the fast decoder of the image's format; None where there is none, or where it is not sure."""
    found = format_of(data)
    decode = None if found is None else found.load_decoder()
    return None if decode is None else decode(data, size, least)


@functools.cache
def _scaler() -> Callable[[U8, tuple[int, int], PixelOffsets, U8], None]:
    """Compiled code, which is loaded with the first image; many commands decode nothing."""
    from dataserver.images.scaling import write_scaled

    return write_scaled


def _decode_by_pillow(data: bytes, size: tuple[int, int], least: tuple[int, int]) -> U8:
    """Decode with Pillow, whose verdict on the image counts."""
    from dataserver.images.pillow_decoder import decode

    try:
        return decode(data, size, least)
    except (MemoryError, InvalidImageError):
        raise
    except Exception as error:  # hostile bytes make a third-party decoder raise nearly anything
        _check_memory(size)
        raise InvalidImageError(f"{type(error).__name__}: {error}") from error


def _check_limits(data: bytes, size: tuple[int, int]) -> None:
    num_pixels = size[0] * size[1]
    if len(data) > MAX_IMAGE_BYTES or num_pixels > MAX_IMAGE_PIXELS:
        raise InvalidImageError(
            f"{len(data)} bytes and {num_pixels} pixels, limits {MAX_IMAGE_BYTES} and {MAX_IMAGE_PIXELS}"
        )


def _check_memory(size: tuple[int, int]) -> None:
    """Raise MemoryError if a decoder could not have had the memory it needs.

    libjpeg and libwebp report a failed allocation like broken data, and that must not pass for a verdict on the image.
    """
    np.empty(size[0] * size[1] * DECODER_BYTES_PER_PIXEL, np.uint8)
