"""What the columns of a Parquet file take in memory, from the headers of their pages.

Arrow reads by these headers, and its footer may say anything of encodings, sizes and counts. So they are walked before
Arrow decodes a column: sizes and encodings that it will meet are known then.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.parquet.footer import check_footer
from dataserver.dataset.shards.parquet.held_file import HeldRanges, RangesFile
from dataserver.dataset.shards.parquet.page_header import (
    DATA_PAGE,
    DATA_PAGE_V2,
    DICTIONARY_INDEXES,
    DICTIONARY_PAGE,
    PageHeader,
    read_page_header,
)
from dataserver.dataset.storage.interface import StoredFile
from dataserver.dataset.storage.registry import storage_of

BUFFER_BYTES: Final = 1 << 20
"""Read at a time of a column: without it, Arrow reads all that a row group has of it."""
LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""How a file begins that stands for another one in a repository."""
MAX_PAGES: Final = 1 << 17
"""Pages of one column of one row group."""
MAX_COLUMN_VALUES: Final = 1 << 22
"""Values of one column of one row group, nulls included."""
_SHARED_PREFIXES: Final = 7
"""DELTA_BYTE_ARRAY: a value may begin with all of the one before, so that each is as long as the page."""
_LARGE: Final = pa.large_binary()


class StoredColumn(NamedTuple):
    """One column of one row group, or several of them together."""

    plain_bytes: int
    """Size of all pages, decompressed."""
    largest_page: int
    """Bytes of the largest page, decompressed."""
    num_values: int
    has_dictionary: bool
    """Whether values are in it once, which Arrow can keep so."""
    shares_prefixes: bool
    """Whether values share bytes in a way that Arrow can only undo: each may be as long as a page."""

    @property
    def unfolds(self) -> bool:
        """Whether each value may be as long as a page, unless Arrow keeps dictionaries."""
        return self.has_dictionary or self.shares_prefixes


EMPTY: Final = StoredColumn(0, 0, 0, False, False)


@dataclass(frozen=True, slots=True)
class OpenParquet:
    """A Parquet file that is read."""

    parquet: pq.ParquetFile
    """The file with its footer; nothing of it was decoded."""
    handle: pa.NativeFile
    ranges: StoredFile

    def held_by(self, reader: HashingReader) -> Self:
        """Return the file, whose columns are read from what a reader holds, as far as it does."""
        ranges = HeldRanges(reader, self.ranges)
        return replace(self, handle=pa.PythonFile(RangesFile(ranges, reader.size), "r"), ranges=ranges)

    def column(self, group: int, leaf: int) -> StoredColumn:
        """Return where the values of a column lie in a row group, as `stored_column` finds them."""
        return stored_column(self.ranges, self.parquet.metadata, group, leaf)

    def foldable(self, leaves: Mapping[str, int], stored: Sequence[Mapping[int, StoredColumn]]) -> frozenset[str]:
        """Return the columns of strings whose dictionaries Arrow can keep, in all row groups.

        Args:
            leaves: numbers of columns, by their paths.
            stored: what the columns of each row group take, by these numbers.
        """
        found = set()
        for path, leaf in leaves.items():
            column = together([group[leaf] for group in stored])
            is_string = self.parquet.schema.column(leaf).physical_type == "BYTE_ARRAY"
            if is_string and column.has_dictionary and not column.shares_prefixes:
                found.add(path)
        return frozenset(found)

    def keeping_dictionaries(self, paths: Collection[str]) -> pq.ParquetFile:
        """Return the file read anew, with columns, by their paths, that stay dictionaries."""
        return pq.ParquetFile(
            self.handle,
            metadata=self.parquet.metadata,
            read_dictionary=list(paths),
            pre_buffer=False,
            buffer_size=BUFFER_BYTES,
        )


@contextmanager
def open_parquet(path: Path) -> Iterator[OpenParquet]:
    """Open a Parquet file and read its footer. Raises OSError, what Arrow raises, or ValueError as `check_footer`."""
    storage = storage_of(path)
    ranges = storage.ranges(path)
    if ranges.read([(0, len(LFS_POINTER))])[0] == LFS_POINTER:
        raise ValueError("it is a pointer of Git LFS; git lfs pull brings the file")
    with (
        storage.open(path, holds_blocks=True) as file,
        pa.PythonFile(file, "r") as handle,
        pq.ParquetFile(handle, pre_buffer=False, buffer_size=BUFFER_BYTES) as parquet,
    ):
        check_footer(handle, parquet.schema)
        yield OpenParquet(parquet, handle, ranges)


def together(columns: Sequence[StoredColumn]) -> StoredColumn:
    """Several row groups of one column, or several columns."""
    return StoredColumn(
        sum(column.plain_bytes for column in columns),
        max((column.largest_page for column in columns), default=0),
        sum(column.num_values for column in columns),
        any(column.has_dictionary for column in columns),
        any(column.shares_prefixes for column in columns),
    )


def chunk_bounds(held: Any) -> tuple[int, int]:
    """First byte of a column chunk and the one behind its last, as Arrow finds them in the footer."""
    start: int = held.data_page_offset
    if held.dictionary_page_offset is not None and held.dictionary_page_offset > 0:
        start = min(start, held.dictionary_page_offset)
    return start, start + int(held.total_compressed_size)


def stored_column(file: StoredFile, metadata: pq.FileMetaData, group: int, leaf: int) -> StoredColumn:
    """Walk the pages of one column of one row group.

    Args:
        file: the Parquet file.
        metadata: its footer.
        group: number of the row group.
        leaf: number of the column among all that hold values.

    Raises:
        ValueError: the pages are not what the footer says, or too many.
        OSError: storage failed.
    """
    held = metadata.row_group(group).column(leaf)
    (at, end), num_values = chunk_bounds(held), held.num_values
    if not 0 <= num_values <= MAX_COLUMN_VALUES:
        raise ValueError(f"{num_values} values in {held.path_in_schema[:80]}, limit {MAX_COLUMN_VALUES}")
    found = EMPTY
    for _ in range(MAX_PAGES):
        if found.num_values >= num_values:
            return found
        header, length = _header(file, at, end)
        at += length + header.packed_bytes
        if at > end:
            raise ValueError(f"a page of {held.path_in_schema[:80]} declares bytes beyond its column")
        found = _with_page(found, header)
    raise ValueError(f"more than {MAX_PAGES} pages in {held.path_in_schema[:80]}; write larger ones")


def _with_page(found: StoredColumn, header: PageHeader) -> StoredColumn:
    if header.kind not in (DATA_PAGE, DATA_PAGE_V2, DICTIONARY_PAGE):
        return found
    is_dictionary = header.kind == DICTIONARY_PAGE
    if is_dictionary and found.has_dictionary:
        raise ValueError("a second dictionary in one column")
    num_values = 0 if is_dictionary else header.num_values
    if header.num_values > MAX_COLUMN_VALUES or found.num_values + num_values > MAX_COLUMN_VALUES:
        raise ValueError(f"more than {MAX_COLUMN_VALUES} values in one column")
    return StoredColumn(
        found.plain_bytes + header.plain_bytes,
        max(found.largest_page, header.plain_bytes),
        found.num_values + num_values,
        found.has_dictionary or is_dictionary or header.encoding in DICTIONARY_INDEXES,
        found.shares_prefixes or header.encoding == _SHARED_PREFIXES,
    )


def _header(file: StoredFile, at: int, end: int) -> tuple[PageHeader, int]:
    return read_page_header(lambda length: file.read([(at, length)])[0], end - at if at >= 0 else 0)


def string_bytes(array: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of all strings within each value of an array, as they are without dictionaries. int64 [values].

    Nothing is unfolded for that. Raises ValueError where values are of a type that is not known.
    """
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return string_bytes(array.storage)
    if pa.types.is_dictionary(kind):
        lengths = np.append(string_bytes(array.dictionary), 0)  # nulls take the last one
        found: npt.NDArray[np.int64] = lengths[array.indices.fill_null(len(lengths) - 1).to_numpy(zero_copy_only=False)]
        return found
    if pa.types.is_struct(kind):
        return sum((string_bytes(field) for field in array.flatten()), np.zeros(len(array), np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        sums = np.append(0, np.cumsum(string_bytes(array.flatten()), dtype=np.int64))
        return np.diff(sums[np.cumsum(counts, dtype=np.int64)], prepend=0)
    if kind.num_fields:
        raise ValueError(f"values of type {str(kind)[:80]}, which are not read; leave the column out")
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return string_bytes(array.cast(pa.large_binary()))
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind) or kind == _LARGE:
        sizes: npt.NDArray[np.int64] = pc.binary_length(array).cast(pa.int64()).fill_null(0).to_numpy()
        return sizes
    return np.zeros(len(array), np.int64)
