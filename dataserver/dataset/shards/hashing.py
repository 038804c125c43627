"""Sequential reader that hashes every byte on the way, so that a shard is read once."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from io import BufferedIOBase
from typing import Final

from crc32c import crc32c as crc32c_of

from dataserver.dataset.storage.pieces import BLOCK_BYTES

READ_CHUNK_BYTES: Final = 1 << 20


class BlockSums:
    """CRC-32C of each block of `BLOCK_BYTES` of a file that is read from its start."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self._room = 0
        """Bytes that the last block may still take."""

    def add(self, data: bytes) -> None:
        """Add the next bytes to the checksums of their blocks."""
        rest = memoryview(data)
        while rest:
            if not self._room:
                self.values.append(0)
                self._room = BLOCK_BYTES
            part = rest[: self._room]
            self.values[-1] = crc32c_of(part, self.values[-1])
            self._room -= len(part)
            rest = rest[len(part) :]


class _Spans:
    """The bytes of some ranges of a file that is read from its start."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take first bytes and the ones behind the last; ranges that touch become one."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(ranges):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
        self._data = [bytearray() for _ in self._starts]
        self._first = 0
        """The first range that is not whole yet."""

    def add(self, at: int, data: bytes) -> None:
        """Add the next bytes of the file, which begin at an offset."""
        end = at + len(data)
        for number in range(self._first, len(self._starts)):
            if self._starts[number] >= end:
                return
            low = max(self._starts[number] - at, 0)
            self._data[number] += memoryview(data)[low : self._ends[number] - at]
            if self._ends[number] > end:
                return
            self._first = number + 1

    def read(self, at: int, length: int) -> bytes | None:
        """Return bytes that were added; None unless all of them were, for one range."""
        number = bisect_right(self._starts, at) - 1
        if number < 0:
            return None
        low = at - self._starts[number]
        if low + length > len(self._data[number]):
            return None
        return bytes(memoryview(self._data[number])[low : low + length])


class HashingReader:
    """Sequential reader of a file of known size that feeds each byte to sha256 once, in large chunks."""

    def __init__(
        self, file: BufferedIOBase, size: int, sha256: str | None = None, sums: BlockSums | None = None
    ) -> None:
        """Begin at a file's start.

        Args:
            file: the file.
            size: its size.
            sha256: its digest, where it is known and nothing needs to be hashed.
            sums: take all bytes as well.
        """
        self._file = file
        self._hash = hashlib.sha256()
        self._known = sha256
        self._sums = sums
        self.size = size
        self._chunk = b""
        """Bytes that are read and hashed already."""
        self._start = 0
        """Where the chunk begins in the file."""
        self._at = 0
        """Where the next byte to be given lies in the chunk."""
        self._spans = _Spans(())

    @property
    def position(self) -> int:
        """Bytes that were given or skipped."""
        return self._start + self._at

    @property
    def remaining(self) -> int:
        """Bytes between the position and the size that the file had when it was opened."""
        return self.size - self._start - self._at

    def read(self, length: int) -> bytes:
        """Read `length` bytes; fewer only where the file ends."""
        end = self._at + length
        if end <= len(self._chunk):
            data = self._chunk[self._at : end]
            self._at = end
            return data
        parts = []
        while length > 0 and (self._at < len(self._chunk) or self._fill()):
            part = self._chunk[self._at : self._at + length]
            self._at += len(part)
            length -= len(part)
            parts.append(part)
        return b"".join(parts)

    def hold(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Hold bytes for `held` while they are read, instead of those that were held before.

        Args:
            ranges: first bytes and the ones behind the last. A range that begins before the position is passed over.
        """
        self._spans = _Spans((start, end) for start, end in ranges if self._start <= start < end)
        self._spans.add(self._start, self._chunk)

    def held(self, at: int, length: int) -> bytes | None:
        """Return bytes from an offset on that were read before; None unless all of them are held."""
        return self._spans.read(at, length)

    def _fill(self) -> bool:
        """Read the next chunk; False where the file ends."""
        self._start += len(self._chunk)
        self._chunk = self._file.read(min(READ_CHUNK_BYTES, self.size - self._start))
        self._at = 0
        self._feed(self._chunk)
        self._spans.add(self._start, self._chunk)
        return bool(self._chunk)

    def _feed(self, data: bytes) -> None:
        if self._known is None:
            self._hash.update(data)
        if self._sums is not None:
            self._sums.add(data)

    def skip(self, length: int) -> bool:
        """Hash `length` bytes without keeping them; say whether any of them is not zero."""
        if self._at + length <= len(self._chunk):
            first, self._at = self._at, self._at + length
            return self._chunk.count(0, first, self._at) != length
        end = min(self.position + length, self.size)
        nonzero = False
        while self.position < end:
            data = self.read(min(READ_CHUNK_BYTES, end - self.position))
            if not data:
                break
            nonzero = nonzero or data.count(0) != len(data)
        return nonzero

    def skip_zeros(self, block: int) -> bool:
        """Skip blocks of `block` zeros; say whether another block follows, at whose start the position is then."""
        while self._at < len(self._chunk) or self._fill():
            rest = self._chunk[self._at :]
            zeros = len(rest) - len(rest.lstrip(b"\0"))
            if zeros < len(rest):
                self._at += zeros - zeros % block
                return True
            self._at = len(self._chunk)
        return False

    def peek(self, length: int) -> bytes:
        """Return the next bytes without moving on; fewer only where the file ends."""
        while len(self._chunk) - self._at < length:
            more = self._file.read(min(READ_CHUNK_BYTES, self.size - self._start - len(self._chunk)))
            if not more:
                break
            self._feed(more)
            self._spans.add(self._start + len(self._chunk), more)
            self._start += self._at
            self._chunk, self._at = self._chunk[self._at :] + more, 0
        return self._chunk[self._at : self._at + length]

    def hexdigest(self) -> str:
        """Return the sha256 of the file, when all of it was read."""
        return self._known or self._hash.hexdigest()
