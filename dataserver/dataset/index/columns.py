"""The columns of an index, and whether a file that claims to be one has them, with values that a build writes.

Arrow itself makes sure that a file can be read without harm. What it reads may still be anything.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataserver.dataset.shards.modalities import IMAGES, MODALITIES, VIDEO, modality_of_format
from dataserver.images import MAX_IMAGE_BYTES

IMAGE_TYPE: Final = pa.struct(
    [
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("orientation", pa.uint8()),
        ("format", pa.uint8()),
    ]
)
MEDIA_TYPE: Final = pa.struct([*IMAGE_TYPE, ("frames", pa.int32()), ("microseconds", pa.int64())])
"""Type of items in an index with videos."""
CORE_SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("kinds", pa.list_(pa.uint8())),
        ("text_bytes", pa.list_(pa.int32())),
        ("texts", pa.list_(pa.string())),
        ("images", pa.list_(IMAGE_TYPE)),
    ]
)
MEDIA_SCHEMA: Final = CORE_SCHEMA.set(4, pa.field("images", pa.list_(MEDIA_TYPE)))
META_TYPES: Final = (pa.int64(), pa.float64(), pa.bool_(), pa.string())
RANGES: Final = {
    "offset": (0, np.iinfo(np.int64).max - MAX_IMAGE_BYTES),
    "length": (0, MAX_IMAGE_BYTES),
    **IMAGES.ranges,
}
"""Least and greatest value of each field of an image; of a clip or a video, of the two that say where it lies."""


def check_schema(schema: pa.Schema, meta_prefix: str) -> None:
    """Raise ValueError, which names the column, if these are not the columns of an index.

    Args:
        schema: all columns of a file.
        meta_prefix: what the names of the columns begin with that come from a sidecar.
    """
    types = {field.name: field.type for field in schema}
    if len(types) < len(schema):
        raise ValueError("it has two columns of one name")
    for field in CORE_SCHEMA:
        if types.pop(field.name, None) not in (field.type, MEDIA_SCHEMA.field(field.name).type):
            raise ValueError(f"it has no column {field.name!a} of type {field.type}")
    for name, kind in types.items():
        if not name.startswith(meta_prefix) or kind not in META_TYPES:
            raise ValueError(f"it has a column {name!a} of type {kind}, which no index has")


def check_rows(rows: pa.RecordBatch, num_rows: int) -> None:
    """Raise ValueError, which says what is wrong, if these are not so many rows of some columns of an index."""
    if rows.num_rows != num_rows:
        raise ValueError(f"it holds {rows.num_rows} rows where its header says {num_rows}")
    core = {name: rows.column(name) for name in rows.schema.names if name in CORE_SCHEMA.names}
    for name, values in core.items():
        if any(part.null_count for part in _parts(values)):
            raise ValueError(f"its column {name!a} lacks values")
    if "kinds" in core:
        counts = _counts_by_kind(core["kinds"])
        for name, kind in (("text_bytes", 0), ("texts", 0), ("images", 1)):
            if name in core and not np.array_equal(_lengths(core[name]), counts[kind]):
                raise ValueError(f"its columns 'kinds' and {name!a} have different numbers of parts")
    if "text_bytes" in core and core["text_bytes"].flatten().to_numpy().min(initial=0) < 0:
        raise ValueError("it holds a text of a negative size")
    if "images" in core:
        images = core["images"].flatten()
        names = [field.name for field in images.type]
        fields = {name: images.field(name).to_numpy() for name in names}
        check_images(fields, modality_of_format(fields["format"]))


def _parts(values: pa.Array) -> Iterator[pa.Array]:
    """An array, and all arrays within it."""
    yield values
    if pa.types.is_list(values.type):
        yield from _parts(values.flatten())
    elif pa.types.is_struct(values.type):
        for field in values.flatten():
            yield from _parts(field)


def _lengths(lists: pa.ListArray) -> npt.NDArray[np.int32]:
    lengths: npt.NDArray[np.int32] = lists.value_lengths().to_numpy()
    return lengths


def _counts_by_kind(kinds: pa.ListArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many texts, and how many images, each row has. int64 [rows] each."""
    flat = kinds.flatten().to_numpy()
    if flat.max(initial=0) > 1:
        raise ValueError(f"its column 'kinds' holds {flat.max()}, which is neither 0 (text) nor 1 (image)")
    lengths = _lengths(kinds)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(flat, dtype=np.int64)])
    ends = np.cumsum(lengths, dtype=np.int64)
    images = before[ends] - before[ends - lengths]
    return lengths - images, images


def check_images(fields: Mapping[str, npt.NDArray[Any]], modality: npt.NDArray[np.uint8] | None = None) -> None:
    """Raise ValueError, which says what is wrong, if fields of images, clips or videos are out of range.

    Args:
        fields: of `MEDIA_TYPE`, int [m] each.
        modality: uint8 [m], of each; None where all are images.
    """
    for name in (RANGES.keys() - IMAGES.ranges.keys()) & fields.keys():
        _check_range("images", name, fields[name], *RANGES[name])
    if modality is None:
        modality = np.zeros(len(fields["width"]), np.uint8)
    if modality.max(initial=0) >= len(MODALITIES):
        raise ValueError(f"it holds a part of the unknown modality {modality.max()}")
    if VIDEO.number in modality and not {"frames", "microseconds"} <= fields.keys():
        raise ValueError("it holds a video, and no frames of it, or no time that they take")
    for known in MODALITIES:
        own = {name: values[modality == known.number] for name, values in fields.items()}
        for name in known.ranges.keys() & own.keys():
            _check_range(known.name, name, own[name], *known.ranges[name])
        most = known.extent(own).max(initial=0)
        if most > known.most:
            raise ValueError(f"it gives {known.one} {most} {known.unit}, the limit is {known.most}")


def _check_range(what: str, name: str, found: npt.NDArray[Any], least: int, greatest: int) -> None:
    if found.min(initial=least) < least or found.max(initial=greatest) > greatest:
        raise ValueError(f"it gives {what} a {name} of {found.min()}..{found.max()}, not of {least}..{greatest}")
