"""Values of MDS columns as rows have them. A pickle is a program and is never looked into.

Fixed sizes and layouts are those of `streaming/base/format/mds/encodings.py`, version 2 of the format.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

from dataserver.dataset.errors import DatasetError, SampleError
from dataserver.dataset.shards.groups import MAX_SAMPLE_MEMBERS
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES, MAX_TEXT_BYTES, parse_value
from dataserver.dataset.shards.modalities import IMAGES, Media, media_of
from dataserver.dataset.shards.parquet.format import IMAGE_NAMES, MUST_BE_IMAGES, ending_of

_NUMBERS: Final = {
    "int": "<i8",
    **{f"{kind}{8 * size}": f"<{kind[0]}{size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
_WRITTEN_NUMBERS: Final[Mapping[str, Callable[[str], float]]] = {
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda text: float(Decimal(text)),
}
_IMAGES: Final = ("jpeg", "png", "pil")
_ARRAYS: Final = ("jpeg_array", "jpegarray")
_LISTS: Final = tuple(f"list[{encoding}]" for encoding in _IMAGES)
_MODES: Final = {"1": None, "L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 2}
"""Modes of raw pixels that PNG has, with the bytes of a pixel; those of mode 1 are bits, rows begin at bytes."""


class MdsColumn(NamedTuple):
    """A column; as `NamedColumn` where it holds images."""

    name: str
    encoding: str
    size: int | None
    """Bytes of every value, where all have the same number."""
    ending: str = IMAGES.ending
    """What names of the members end in, as in `NamedColumn`."""

    @property
    def is_list(self) -> bool:
        """Whether a row has a list of images."""
        return self.encoding in _ARRAYS + _LISTS

    @property
    def has_bytes(self) -> bool:
        """Whether the column holds bytes of images, as in `NamedColumn`."""
        return self.encoding == "bytes" or self.encoding in _IMAGES or self.is_list

    @property
    def is_image(self) -> bool:
        """Whether its values claim to be images, clips or videos, whatever they begin with, or should be."""
        is_named = self.name.lower() in (IMAGE_NAMES if self.has_bytes else MUST_BE_IMAGES)
        is_other = self.has_bytes and self.ending != IMAGES.ending
        return is_named or is_other or (self.has_bytes and self.encoding != "bytes")

    @property
    def is_text(self) -> bool:
        """Whether its values are strings."""
        return self.encoding == "str"

    @property
    def is_used(self) -> bool:
        """Whether a row has its values: all but arrays and pickles, and what is not known."""
        known = self.is_text or self.encoding == "json" or self.encoding in _NUMBERS.keys() | _WRITTEN_NUMBERS.keys()
        return known or self.has_bytes or self.is_image


def checked(columns: Sequence[tuple[str, str, int | None]], media: Media) -> list[MdsColumn]:
    """Return the columns of a shard, with what they hold of media that are read.

    Raises:
        ValueError: one has another size than its encoding.
    """
    found = [MdsColumn(*column, ending_of(column[0].lower(), media)) for column in columns]
    for column in found:
        size = np.dtype(_NUMBERS[column.encoding]).itemsize if column.encoding in _NUMBERS else None
        is_array = column.encoding.startswith("ndarray")  # these may have any
        if column.size != size and not is_array:
            raise ValueError(f"column {column.name[:80]!a}: {column.encoding} of {column.size} bytes, {size} expected")
    return found


def unused_reason(column: MdsColumn) -> str:
    """Why the values of a column are not read."""
    if column.encoding == "pkl":
        return "pickles, which are programs and are never run; write it again as json"
    if column.is_text:
        return "texts; name the files of images in a .jsonl"
    if column.encoding.startswith("ndarray"):
        return "arrays, which no filter can compare"
    return f"values encoded as {column.encoding[:40]!a}, which are not read"


def plain_value(column: MdsColumn, data: bytes) -> Any:
    """Return a text, number or JSON value. Raises ValueError or SampleError where the bytes are none."""
    if column.encoding in _NUMBERS:
        return np.frombuffer(data, _NUMBERS[column.encoding])[0].item()
    if len(data) > MAX_TEXT_BYTES:
        raise SampleError("text_too_large", f"{len(data)} bytes, limit {MAX_TEXT_BYTES}")
    text = data.decode()
    if column.is_text:
        return text
    if column.encoding == "json":
        return parse_value(text)
    try:
        return _WRITTEN_NUMBERS[column.encoding](text)
    except ArithmeticError as error:  # of decimals
        raise ValueError(f"{text[:40]!a} is no number") from error


def images_in(column: MdsColumn, data: bytes, media: Media) -> list[bytes | SampleError | None]:
    """Return the images, clips or videos of one value; None stands for bytes that claim to be none.

    Raises:
        DatasetError: the parts of a list do not fill it.
    """
    if not column.has_bytes:
        return [SampleError("missing_image", f"column {column.name[:80]} holds {unused_reason(column)}")]
    try:
        elements = _elements(column, data) if column.is_list else [data]
    except SampleError as error:
        return [error]
    if column.encoding in ("pil", "list[pil]"):
        return [_as_png(element) for element in elements]
    return [element if column.is_image or media_of(element, media) else None for element in elements]


def _elements(column: MdsColumn, data: bytes) -> list[bytes]:
    """Cut a list into its elements. Raises DatasetError where they do not fill it, SampleError for too many."""
    at = 0 if column.encoding in _ARRAYS else 4  # a word without a meaning yet
    count = int.from_bytes(data[at : at + 4], "little")
    at += 4
    if len(data) < at + 4 * count:
        raise DatasetError(f"column {column.name[:80]!a}: a list of {len(data)} bytes declares {count} images")
    if count > MAX_SAMPLE_MEMBERS:  # each may be empty, and costs far more here than its four bytes
        raise SampleError("too_many_members", f"column {column.name[:80]}: {count} images, limit {MAX_SAMPLE_MEMBERS}")
    sizes = np.frombuffer(data, "<u4", count, at).tolist()
    at += 4 * count
    if at + sum(sizes) != len(data):
        raise DatasetError(f"column {column.name[:80]!a}: a list of {len(data)} bytes declares {at + sum(sizes)}")
    found = []
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return found


def _as_png(data: bytes) -> bytes | SampleError:
    """Raw pixels with their size and mode as the PNG that has the same pixels."""
    width, height, mode_bytes = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4, 8))
    if len(data) < 12 or mode_bytes > 16:
        return SampleError("unreadable_header", "raw pixels without a size and a mode")
    mode = data[12 : 12 + mode_bytes].decode("ascii", "replace")
    if mode not in _MODES:
        what = "has lost its palette" if mode == "P" else "is not in PNG"
        return SampleError("unreadable_header", f"raw pixels of mode {mode!a}, which {what}; store the file itself")
    pixels = data[12 + mode_bytes :]
    per_pixel = _MODES[mode]
    expected = height * ((width + 7) // 8 if per_pixel is None else width * per_pixel)
    if len(pixels) != expected or not pixels:
        return SampleError("unreadable_header", f"{width} x {height} pixels of mode {mode} in {len(pixels)} bytes")
    if len(pixels) > MAX_MEMBER_BYTES:
        return SampleError("image_too_large", f"{len(pixels)} bytes of pixels, limit {MAX_MEMBER_BYTES}")
    out = io.BytesIO()
    Image.frombytes(mode, (width, height), pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()
