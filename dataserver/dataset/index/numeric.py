"""The numeric columns of one shard: what planning and serving need of all its samples.

They come from the index, and lie beside it once more in a file of arrays (`arrays.py`). An index has them in many small
compressed buffers between the texts; to put these together and to check every value takes five times as long, for every
shard of every shuffle window, on every server. Anybody may delete the second file.
"""

import logging
import threading
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import DatasetError, printable
from dataserver.dataset.index.arrays import ArraysError, read_about, read_arrays, write_arrays
from dataserver.dataset.index.format import IndexHeader, read_columns
from dataserver.dataset.shards.modalities import VIDEO, modality_of_format

if TYPE_CHECKING:
    import pyarrow as pa

NUMERIC_SUFFIX: Final = ".numeric"
IMAGE_COLUMNS: Final = ("width", "height")
"""Columns that filters and transforms have of the first image of each sample, where no sidecar has them."""
_VERSION: Final = 1
_COLUMNS: Final = ("kinds", "text_bytes", "images")

_TYPES: Final = {
    "text_offsets": np.int64,
    "image_offsets": np.int64,
    "kinds": np.uint8,
    "image_width": np.int32,
    "image_height": np.int32,
    "text_bytes": np.int32,
    "image_offset": np.int64,
    "image_length": np.int64,
    "orientation": np.uint8,
}
"""Type of each column, by name."""
_OPTIONAL: Final = {"image_modality": np.uint8, "image_frames": np.int32, "image_microseconds": np.int64}
"""The columns that stand there only where there is a clip, or a video: they came after the others."""

_log = logging.getLogger(__name__)
_told: Final = threading.Event()
"""Whether the log of this process has a warning of a second file that cannot be used."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardSizes:
    """What is known of a shard's n samples before decoding: t text parts, m images, all in row and document order."""

    text_offsets: npt.NDArray[np.int64]
    """int64[n + 1]: row r has the text parts text_offsets[r] .. text_offsets[r + 1]."""
    image_offsets: npt.NDArray[np.int64]
    """int64[n + 1]: row r has the images image_offsets[r] .. image_offsets[r + 1]."""
    kinds: npt.NDArray[np.uint8]
    """uint8[t + m]: 0 text, 1 image; row r starts at text_offsets[r] + image_offsets[r]."""
    image_width: npt.NDArray[np.int32]
    """Pixels of each image, turned upright, int32[m]."""
    image_height: npt.NDArray[np.int32]
    """Pixels of each image, turned upright, int32[m]."""
    text_bytes: npt.NDArray[np.int32]
    """Bytes of each text in UTF-8, int32[t]."""
    image_modality: npt.NDArray[np.uint8] | None = field(default=None, kw_only=True)
    """uint8[m]: number of the modality of each (`modalities.MODALITIES`); None where all are images."""
    image_frames: npt.NDArray[np.int32] | None = field(default=None, kw_only=True)
    """int32[m]: frames of each video, 0 of others; None where there is no video."""
    image_microseconds: npt.NDArray[np.int64] | None = field(default=None, kw_only=True)
    """int64[m]: what they take, in the same way."""

    def of_first_images(self, name: str) -> "pa.Array":
        """A column of `IMAGE_COLUMNS` for the first image of each sample, int64 [n]; null where there is no image."""
        import pyarrow as pa

        values, offsets = self.image_width if name == "width" else self.image_height, self.image_offsets
        if self.image_modality is not None:  # what a document may have before its images is left out
            is_image = self.image_modality == 0
            values, offsets = values[is_image], np.concatenate([[0], np.cumsum(is_image)])[offsets]
        has_image = np.diff(offsets) > 0
        first = np.zeros(len(has_image), np.int64)
        first[has_image] = values[offsets[:-1][has_image]]
        return pa.array(first, mask=~has_image)


@dataclass(frozen=True, slots=True, eq=False)
class NumericColumns(ShardSizes):
    """The sizes, and where the bytes of images lie."""

    image_offset: npt.NDArray[np.int64]
    """int64[m]: first byte in the tar."""
    image_length: npt.NDArray[np.int64]
    """Bytes of each image's file, int64[m]."""
    orientation: npt.NDArray[np.uint8]
    """Orientation of each image by EXIF, uint8[m]."""

    @property
    def optional(self) -> tuple[npt.NDArray[Any] | None, ...]:
        """Modality, frames and microseconds, where these are there."""
        return self.image_modality, self.image_frames, self.image_microseconds

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Those that are there, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in found.items() if array is not None}


def numeric_path(index: Path) -> Path:
    """The second file, beside an index."""
    return index.with_suffix(NUMERIC_SUFFIX)


def read_numeric(index: Path, header: IndexHeader) -> NumericColumns:
    """Read the numeric columns of a shard, from the index itself where the second file is missing or not of it.

    Raises:
        StaleIndexError: the index is damaged, or not the one that `header` was read from.
    """
    path = numeric_path(index)
    try:
        about, arrays = read_arrays(path)
        if about != _about(header):
            raise ArraysError("it was written with another index, or by another release")
        columns = NumericColumns(**arrays)
        _check(columns, header.num_samples)
        return columns
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (ValueError, TypeError) as error:
        level = logging.INFO if _told.is_set() else logging.WARNING
        _told.set()
        _log.log(
            level,
            "%s is not used (%s); the index is read instead: remove it and index again. Others are logged as INFO",
            *(path, printable(str(error))),
        )
    return _columns(read_columns(index, header, _COLUMNS))


def has_numeric(index: Path, header: IndexHeader) -> bool:
    """Whether the second file is there, whole as far as its size tells, and of this index."""
    try:
        return read_about(numeric_path(index)) == _about(header)
    except (OSError, ArraysError):
        return False


def write_numeric(index: Path, header: IndexHeader) -> str:
    """Write the second file from the index; why not, where that is impossible.

    Raises:
        StaleIndexError: as `read_numeric`.
    """
    columns = _columns(read_columns(index, header, _COLUMNS))
    try:
        arrays = columns.arrays()
        written = sorted(arrays, key=_OPTIONAL.__contains__)  # these behind the others
        write_arrays(numeric_path(index), _about(header), {name: arrays[name] for name in written})
    except DatasetError as error:
        return str(error)
    return ""


def _check(found: NumericColumns, num_samples: int) -> None:
    """Raise ValueError, which says what is wrong, if these are not columns of so many rows: as `columns.check_rows`."""
    from dataserver.dataset.index.columns import check_images

    texts, images = found.text_bytes.size, found.image_width.size
    rows = num_samples + 1
    lengths = {"text_offsets": rows, "image_offsets": rows, "kinds": texts + images, "text_bytes": texts}
    for name, array in found.arrays().items():
        kind, length = (_TYPES | _OPTIONAL)[name], lengths.get(name, images)
        if array.dtype != kind or array.shape != (length,):
            raise ValueError(f"its {name} are {array.dtype}{[*array.shape]}, not {np.dtype(kind)}[{length}]")
    for offsets, count in ((found.text_offsets, texts), (found.image_offsets, images)):
        if offsets[0] != 0 or offsets[-1] != count or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"its rows do not have the {count} parts that it holds")
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(found.kinds, dtype=np.int64)])
    counted = before[found.text_offsets + found.image_offsets]
    if found.kinds.max(initial=0) > 1 or not np.array_equal(counted, found.image_offsets):
        raise ValueError("its kinds are not those of the parts that its rows have")
    if found.text_bytes.min(initial=0) < 0:
        raise ValueError("it holds a text of a negative size")
    timed: dict[str, npt.NDArray[Any]] = {} if found.image_frames is None else {"frames": found.image_frames}
    if found.image_microseconds is not None:
        timed["microseconds"] = found.image_microseconds
    check_images(
        {
            "offset": found.image_offset,
            "length": found.image_length,
            "width": found.image_width,
            "height": found.image_height,
            "orientation": found.orientation,
            **timed,
        },
        found.image_modality,
    )


def _columns(rows: "pa.RecordBatch") -> NumericColumns:
    kinds, texts, images = map(rows.column, _COLUMNS)
    flat = images.flatten()

    def column(name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = flat.field(name).to_numpy(zero_copy_only=False)
        return values

    modality = modality_of_format(column("format"))
    has_videos = VIDEO.number in modality

    return NumericColumns(
        text_offsets=_offsets(texts),
        image_offsets=_offsets(images),
        kinds=kinds.flatten().to_numpy(zero_copy_only=False),
        image_width=column("width"),
        image_height=column("height"),
        text_bytes=texts.flatten().to_numpy(zero_copy_only=False),
        image_offset=column("offset"),
        image_length=column("length"),
        orientation=column("orientation"),
        image_modality=modality if modality.any() else None,
        image_frames=column("frames") if has_videos else None,
        image_microseconds=column("microseconds") if has_videos else None,
    )


def _about(header: IndexHeader) -> dict[str, Any]:
    return {"numeric": _VERSION, "index": asdict(header)}


def _offsets(lists: "pa.ListArray") -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False), out=offsets[1:])
    return offsets
