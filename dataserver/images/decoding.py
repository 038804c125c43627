"""From encoded images to patches: decode, scale to the patch grid, turn upright, cut.

The rules of content_version 2:

1. A format of `formats.py`, told by magic; the first frame of an animation. The stored size must be the one in the
   index. GIF, BMP, AVIF and TIFF came later than the others; an index that was made before has none of these.
2. Of quality `fast`, a JPEG is decoded at the smallest of the scales 1/1, 1/2, 1/4, 1/8 that still covers the grid; of
   quality `exact`, all images are decoded whole.
3. 16-bit grey keeps its high byte; palettes, CMYK and bilevel images become RGB; what is transparent lies on white,
   in PNGs also the one colour that is transparent, all of its bits. Colour profiles are ignored.
4. Scaled to exactly (columns x patch, rows x patch), aspect not kept to the pixel, by the filter of `scaling.py`.
5. Turned upright as its EXIF orientation says.
6. An image whose data end too early is invalid, be it a JPEG that lacks its end marker alone or a PNG that lacks IEND.
   Where the dataset accepts such images (`may_be_truncated`), a JPEG gets an end marker and a PNG rows of zeros, and
   Pillow decodes that. What lacks is grey: as libjpeg leaves it, and (128, 128, 128) in a PNG. A WebP stays invalid.

Where the sizing has a `rule`, it says what an image is scaled to instead of 4., and which part of that is cut into
patches; with `tiles`, all parts one after the other. With `resampling` an image is turned upright before it is scaled,
by that filter of Pillow.

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
from dataserver.images.resampling import Target, target_of, write_resampled
from dataserver.images.squares import write_padded
from dataserver.images.tiles import write_tiles
from dataserver.images.transforms import DrawnTransform, enlarged, transform
from dataserver.images.truncation import Size
from dataserver.planning.job.fields import Quality, Sizing, SizingRule
from dataserver.transforms import TransformFailedError

logger = logging.getLogger(__name__)

GREY: Final = 128
"""Value of all pixels that an image lacks."""
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
    may_be_truncated: bool = False
    """Whether its data may end too early."""
    tiles: tuple[int, int] = (0, 0)
    """Rows and columns of tiles, with the rule `tiles`; 0 where it is not cut."""


class StoredImage(Protocol):
    """What the index says of an image."""

    @property
    def width(self) -> int:
        """Pixels, when the image is turned upright."""

    @property
    def height(self) -> int:
        """Pixels, when the image is turned upright."""

    @property
    def orientation(self) -> int:
        """EXIF orientation, 1 to 8."""

    @property
    def may_be_truncated(self) -> bool:
        """Whether its data may end too early."""


class ImageFault(NamedTuple):
    """What is wrong with an image."""

    detail: str
    is_served: bool
    """Whether servers deliver it all the same."""


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
        True; or False, with zeros in `out`, where `data` is not a usable image, or a transform of a user fails for it:
        a pure function of the arguments.

    Raises:
        ValueError: `out` or the grid does not fit the sizing.
        MemoryError: the machine, not the image, is at fault.
        TransformUnavailableError: a transform of a user took too long.
    """
    _check_target(shape, sizing, out)
    size = _as_stored(shape.width, shape.height, shape.orientation)
    target = _target(shape, sizing)
    goal = _as_stored(target.width, target.height, shape.orientation)
    try:
        wanted = enlarged(goal, drawn) if sizing.quality is Quality.FAST else size
        pixels = _decode(data, size, wanted, shape.may_be_truncated)[0]
        if drawn:
            pixels = np.ascontiguousarray(transform(UPRIGHT[shape.orientation](pixels), drawn))
            size, shape = pixels.shape[1::-1], shape._replace(orientation=1)
    except (InvalidImageError, TransformFailedError) as error:
        logger.debug("an image of %d bytes cannot be made: %s", len(data), error)
        out.fill(0)
        return False
    _write_scaled(pixels, size, shape, sizing, out)
    return True


def _target(shape: ImageShape, sizing: Sizing) -> Target:
    """What an image is scaled to; of a tiled one the size of all its tiles together."""
    if sizing.tiles is None:
        return target_of((shape.width, shape.height), shape.rows, shape.columns, sizing)
    rows, columns = (max(1, number) * (sizing.side or 1) for number in shape.tiles)
    return Target(columns, rows)


def write_scaled_patches(pixels: U8, shape: ImageShape, sizing: Sizing, out: U8) -> None:
    """Scale pixels to their patch grid and cut them, as `decode_patches` does with those of an image.

    Args:
        pixels: uint8 [height, width, 3], C-contiguous, as they are stored.
        shape: their size, turn and patch grid.
        sizing: side of a patch, and of a merge block; filter.
        out: uint8 [rows * columns, patch * patch * 3], C-contiguous, overwritten.
    """
    _check_target(shape, sizing, out)
    _write_scaled(pixels, (pixels.shape[1], pixels.shape[0]), shape, sizing, out)


def _write_scaled(pixels: U8, size: tuple[int, int], shape: ImageShape, sizing: Sizing, out: U8) -> None:
    """Scale the pixels of an image of `size`, decoded at one of its scales, and cut them into patches."""
    if sizing.resampling is not None:
        upright = UPRIGHT[shape.orientation](pixels)
        whole = _as_stored(*size, shape.orientation)
        if sizing.tiles is not None:
            write_tiles(upright, whole, (shape.width, shape.height), shape.tiles, sizing, out)
            return
        if sizing.rule is SizingRule.PAD:
            write_padded(upright, sizing, out)
            return
        target = target_of(whole, shape.rows, shape.columns, sizing)
        write_resampled(upright, whole, target, (shape.rows, shape.columns), sizing, out)
        return
    if pixels.shape[1::-1] == _as_stored(shape.columns * sizing.patch, shape.rows * sizing.patch, shape.orientation):
        write_patches(UPRIGHT[shape.orientation](pixels), sizing, out)
    else:
        of = pixel_offsets(shape.rows, shape.columns, sizing.patch, sizing.merge, shape.orientation)
        _scaler()(pixels, size, of, out)


def fault_of(data: bytes, image: StoredImage) -> ImageFault | None:
    """Say why servers deliver an image as invalid, or only a part of it; None where they deliver it whole.

    Raises:
        MemoryError: the machine, not the image, is at fault.
    """
    try:
        size = _as_stored(image.width, image.height, image.orientation)
        why = _decode(data, size, (1, 1), image.may_be_truncated)[1]
    except InvalidImageError as error:
        return ImageFault(str(error), is_served=False)
    return ImageFault(f"{why}; the part that lacks is grey", is_served=True) if why else None


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


def _decode(data: bytes, size: Size, least: Size, may_be_truncated: bool) -> tuple[U8, str]:
    """Decode an image that is stored with `size` (width, height) pixels; `least` suffice.

    Returns:
        uint8 [height, width, 3], C-contiguous, as it is stored; the next call of this thread may overwrite it. And why
        a part of it is grey; nothing where it is whole.

    Raises:
        InvalidImageError: the bytes are not a usable image.
        MemoryError: the machine, not the image, is at fault.
    """
    _check_limits(data, size)
    pixels = decode_fast(data, size, least)
    if pixels is not None:
        return pixels, ""
    found = format_of(data)
    try:
        if found is not None and found.is_whole is not None and not found.is_whole(data):
            raise InvalidImageError(f"its data end before the end of the {found.title}")
        return _decode_by_pillow(data, size, least), ""
    except InvalidImageError as error:
        completed = found.complete(data, size) if may_be_truncated and found and found.complete else None
        if completed is None:
            raise
        pixels = _decode_by_pillow(completed.data, size, least)
        for part in completed.missing:
            pixels[part] = GREY
        return pixels, str(error)


def decode_fast(data: bytes, size: Size, least: Size) -> U8 | None:
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
