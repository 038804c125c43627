"""A Parquet file in a store, whose columns are read from the bytes that the pass over the file holds."""

from collections.abc import Sequence

from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.interface import StoredFile
from dataserver.dataset.storage.seekable_file import SeekableFile


class HeldRanges:
    """Reads what a reader holds from there, and anything else from storage. Fulfils `StoredFile`."""

    def __init__(self, reader: HashingReader, ranges: StoredFile) -> None:
        self._reader = reader
        self._ranges = ranges

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read pieces as `StoredFile.read`."""
        return [self._read(at, length) for at, length in ranges]

    def _read(self, at: int, length: int) -> bytes:
        held = self._reader.held(at, length)
        return self._ranges.read([(at, length)])[0] if held is None else held

    def etag(self) -> Etag:
        """Return the state of the file in storage."""
        return self._ranges.etag()


class RangesFile(SeekableFile):
    """Files that are read by ranges, as Arrow reads them. Each read is whole, so that no buffer is needed."""

    def __init__(self, ranges: StoredFile, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._ranges = ranges

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        """Read as many bytes as fit or are left."""
        length = min(len(buffer), self._num_bytes - self._at)
        if length <= 0:
            return 0
        data = self._ranges.read([(self._at, length)])[0]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
