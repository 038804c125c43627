"""The samples of an MDS shard as samples of a tar, read once from its first byte to its last.

A shard is a count, the offsets of all samples and of the end, its columns as JSON, and the samples: sizes of the
values that differ in size, and the values. What differs from the index ends the conversion of the shard.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataserver.dataset.conversion.decompression import decompressed
from dataserver.dataset.conversion.mds_index import MdsShard
from dataserver.dataset.conversion.mds_values import (
    MdsColumn,
    checked,
    images_in,
    plain_value,
    unused_reason,
)
from dataserver.dataset.conversion.parquet_samples import MAX_LINE_BYTES
from dataserver.dataset.conversion.row_samples import RowSamples
from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import DatasetError, Findings, SampleError, is_of_storage
from dataserver.dataset.kinds import ODD_VALUES, UNUSABLE_COLUMN
from dataserver.dataset.shards.modalities import Media
from dataserver.dataset.shards.pages import unpack
from dataserver.dataset.shards.parquet.format import IMAGE_NAMES
from dataserver.dataset.shards.row_members import CAPTION_NAMES, JSON_NAME, KEY_NAMES, Row, no_keys
from dataserver.dataset.storage.registry import storage_of

MAX_SAMPLES: Final = 1 << 22
MAX_CONFIG_BYTES: Final = 4 << 20
MAX_WHOLE_BYTES: Final = 1 << 30
"""Largest shard compressed with Snappy, which has no stream: it is decompressed whole."""
_READ_BYTES: Final = 1 << 20
_STREAMS: Final = {"zstd": ".zst", "gz": ".gz", "bz2": ".bz2"}


def mds_samples(path: Path, shard: MdsShard, findings: Findings, media: Media) -> Iterator[Members]:
    """Yield the members of each sample, in order.

    Args:
        path: the file of the shard.
        shard: what the index says of it.
        findings: where columns and samples are counted that nothing is made of.
        media: whose bytes are looked for in columns of the encoding `bytes`.

    Raises:
        DatasetError: the shard is not what the index says, or is damaged.
        OSError: storage failed.
    """
    try:
        columns = checked(shard.columns, media)
    except ValueError as error:
        raise DatasetError(f"{path}: {error}; copy the dataset again") from error
    rows = _Rows(columns, findings, media)
    with storage_of(path).open(path) as file:
        hashed = _HashedFile(file, shard)
        try:
            for number, sample in enumerate(_samples(_Stream(_pieces(hashed, shard, str(path))), shard)):
                yield from rows.members(number, sample)
            hashed.check()
        except (ValueError, OSError, pa.ArrowException) as error:
            if is_of_storage(error):
                raise
            text = str(error)
            raise DatasetError(text if str(path) in text else f"{path}: {text}; copy the dataset again") from error
    rows.report()


class _HashedFile:
    """A file that is hashed as it is read, and compared with what the index says."""

    def __init__(self, file: BufferedIOBase, shard: MdsShard) -> None:
        self._file = file
        self._shard = shard
        self._num_bytes = 0
        known = (algorithm for algorithm, _ in shard.hashes if algorithm in hashlib.algorithms_guaranteed)
        self._algorithm = next((name for name in known if not name.startswith("shake_")), "")
        self._hash = hashlib.new(self._algorithm, usedforsecurity=False) if self._algorithm else None
        self.closed = False  # Arrow asks

    def read(self, length: int = -1) -> bytes:
        """Read up to so many bytes."""
        data = self._file.read(length)
        self._num_bytes += len(data)
        if self._hash is not None:
            self._hash.update(data)
        return data

    def close(self) -> None:
        """Nothing: who opened the file closes it."""

    def check(self) -> None:
        """Read the rest. Raises ValueError where the file is not the one that was indexed."""
        while self.read(_READ_BYTES):
            pass
        if self._num_bytes != self._shard.file_bytes:
            raise ValueError(f"it has {self._num_bytes} bytes, its index says {self._shard.file_bytes}")
        if self._hash is not None and self._hash.hexdigest() != dict(self._shard.hashes)[self._algorithm]:
            raise ValueError(f"its {self._algorithm} is not the one in its index")


def _pieces(file: _HashedFile, shard: MdsShard, name: str) -> Iterator[bytes]:
    """Yield the bytes of a shard, decompressed. Raises ValueError, DatasetError, OSError or what Arrow raises."""
    if not shard.compression:
        yield from iter(lambda: file.read(_READ_BYTES), b"")
    elif shard.compression in _STREAMS:
        yield from decompressed(file, _STREAMS[shard.compression], name)
    elif shard.compression == "br":
        with pa.CompressedInputStream(pa.PythonFile(file, "r"), "brotli") as stream:
            yield from iter(lambda: stream.read(_READ_BYTES), b"")
    elif shard.compression == "snappy":
        if max(shard.num_bytes, shard.file_bytes) > MAX_WHOLE_BYTES:
            raise ValueError(f"{shard.num_bytes} bytes compressed with snappy, limit {MAX_WHOLE_BYTES}")
        yield unpack(file.read(shard.file_bytes), shard.num_bytes, "SNAPPY")
    else:
        raise ValueError(f"it is compressed with {shard.compression[:40]!a}, which is not read; write it with zstd")


class _Stream:
    """Bytes that are read one after the other."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = b""
        self._at = 0

    def read(self, length: int) -> bytes:
        """Read exactly so many bytes. Raises ValueError where there are fewer."""
        end = self._at + length
        if end <= len(self._held):
            found = self._held[self._at : end]
            self._at = end
            return found
        parts, left = [self._held[self._at :]], length - (len(self._held) - self._at)
        while left > 0:
            self._held = next(self._pieces, b"")
            if not self._held:
                raise ValueError(f"it ends {left} bytes before it should")
            self._at = min(left, len(self._held))
            parts.append(self._held[: self._at])
            left -= self._at
        return b"".join(parts)

    def check_end(self) -> None:
        """Raise ValueError if anything follows."""
        if self._at < len(self._held) or any(self._pieces):
            raise ValueError("more follows its last sample")


def _samples(stream: _Stream, shard: MdsShard) -> Iterator[bytes | None]:
    """Yield the bytes of each sample; None for one that is too large. Raises ValueError where offsets lie."""
    count = int.from_bytes(stream.read(4), "little")
    if count != shard.num_samples or count > MAX_SAMPLES:
        raise ValueError(f"it declares {count} samples, its index {shard.num_samples}, limit {MAX_SAMPLES}")
    offsets: npt.NDArray[np.int64] = np.frombuffer(stream.read(4 * (count + 1)), "<u4").astype(np.int64)
    sizes = np.diff(offsets)
    begin = 4 + 4 * (count + 1)
    if not begin <= offsets[0] <= begin + MAX_CONFIG_BYTES or bool((sizes < 0).any()):
        raise ValueError("its offsets do not follow each other")
    if offsets[-1] != shard.num_bytes:
        raise ValueError(f"its samples end at byte {offsets[-1]}, its index says {shard.num_bytes}")
    _check_columns(stream.read(int(offsets[0]) - begin), shard)
    for size in sizes.tolist():
        if size <= MAX_LINE_BYTES:
            yield stream.read(size)
            continue
        for left in range(size, 0, -_READ_BYTES):
            stream.read(min(left, _READ_BYTES))
        yield None
    stream.check_end()


def _check_columns(config: bytes, shard: MdsShard) -> None:
    """Raise ValueError where a shard has other columns than its index says."""
    try:
        held = json.loads(config)
        found = [tuple(held[key]) for key in ("column_names", "column_encodings")]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise ValueError(f"its columns cannot be read ({type(error).__name__})") from error
    if found != [tuple(column[part] for column in shard.columns) for part in (0, 1)]:
        raise ValueError("it has other columns than its index says")


class _Rows:
    """Makes the members of the tar from the samples of a shard."""

    def __init__(self, columns: Sequence[MdsColumn], findings: Findings, media: Media) -> None:
        self._columns, self._media = columns, media
        self._findings = findings
        images = [column for column in columns if column.has_bytes or column.is_image]
        # The writer sorts columns by name, so that the first one is not the one that was meant.
        self._images = sorted(images, key=lambda column: column.name.lower() not in IMAGE_NAMES)
        texts = {column.name for column in columns if column.is_text}
        self._key = next((name for name in KEY_NAMES if name in texts), None)
        self._caption = next((name for name in CAPTION_NAMES if name in texts), None)
        self._samples = RowSamples(self._images, findings)
        self._odd: dict[str, str] = {}

    def members(self, number: int, sample: bytes | None) -> Iterator[Members]:
        """Yield the members of one sample, if it becomes any. Raises ValueError where its sizes lie."""
        if sample is None:
            self._findings.add("", "image_too_large", f"sample {number}: over {MAX_LINE_BYTES} bytes")
            return
        values = self._values(number, sample)
        images = [images_in(column, values.pop(column.name), self._media) for column in self._images]
        document = {
            column.name: value
            for column in self._columns
            if column.name in values and column.is_used
            if (value := self._plain(number, column, values[column.name])) is not None
        }
        taken = (None if name is None else document.pop(name, None) for name in (self._key, self._caption))
        key, caption = taken
        text = SampleError("missing_caption", "it has no text") if caption is None else caption.encode()
        yield from self._samples.of(number, Row(key, text, document, [None] * len(self._images)), images)

    def report(self) -> None:
        """Count the columns that nothing was made of, and values that are none."""
        for column in self._columns:
            if not column.is_used:
                self._findings.add("", UNUSABLE_COLUMN, f"{column.name}: a column of {unused_reason(column)}")
        self._samples.report()
        for column in self._columns if self._key is None else ():
            if column.name in KEY_NAMES:
                self._findings.add("", UNUSABLE_COLUMN, f"{column.name}: {no_keys(column.encoding)}")
        for name, detail in self._odd.items():
            self._findings.add("", ODD_VALUES, f"{name}: {detail}")

    def _values(self, number: int, sample: bytes) -> dict[str, bytes]:
        """Cut a sample into its values, by column."""
        varying = [column for column in self._columns if column.size is None]
        at = 4 * len(varying)
        if len(sample) < at:
            raise ValueError(f"sample {number} of {len(sample)} bytes has no room for the sizes of its values")
        given = iter(np.frombuffer(sample, "<u4", len(varying)).tolist())
        sizes = [next(given) if column.size is None else column.size for column in self._columns]
        if at + sum(sizes) != len(sample):
            raise ValueError(f"sample {number} has {len(sample)} bytes, its values would take {at + sum(sizes)}")
        found = {}
        for column, size in zip(self._columns, sizes, strict=True):
            found[column.name] = sample[at : at + size]
            at += size
        return found

    def _plain(self, number: int, column: MdsColumn, data: bytes) -> Any:
        try:
            found = plain_value(column, data)
            if column.name == JSON_NAME and not (column.is_text or isinstance(found, dict)):
                raise ValueError("no object")
        except (ValueError, SampleError) as error:  # also of UTF-8
            detail = error.detail if isinstance(error, SampleError) else str(error)
            self._odd.setdefault(column.name, f"a value cannot be used and is missing (sample {number}: {detail[:80]})")
            return None
        return found
