"""Pieces of objects: what is asked for at once, and by whom."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.etags import Etag

BLOCK_BYTES: Final = 8 << 20
GAP_BYTES: Final = 64 << 10
"""Pieces with no more between them are read as one."""
MAX_RUN_BYTES: Final = 4 << 20


class Source(Protocol):
    """What pieces are read from."""

    name: str

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        """Read a range. Raises OSError."""


class BlockKey(NamedTuple):
    """One block of one version of an object."""

    store: str
    info: ObjectInfo
    number: int

    @property
    def num_bytes(self) -> int:
        """Length of the block; the last one of an object is shorter."""
        return min(BLOCK_BYTES, self.info.num_bytes - self.number * BLOCK_BYTES)

    @property
    def object_digest(self) -> bytes:
        """Names the object among servers."""
        return _object_digest(self.store, self.info)


class Piece(NamedTuple):
    """Some bytes of an object, at least one."""

    source: Source
    info: ObjectInfo
    start: int
    length: int

    @property
    def end(self) -> int:
        """Where it ends in the object."""
        return self.start + self.length

    @property
    def key(self) -> tuple[str, ObjectInfo, int, int]:
        """What tells it from others."""
        return self.source.name, self.info, self.start, self.length

    @property
    def blocks(self) -> list[BlockKey]:
        """The blocks that it lies in."""
        numbers = range(self.start // BLOCK_BYTES, (self.end - 1) // BLOCK_BYTES + 1)
        return [BlockKey(self.source.name, self.info, number) for number in numbers]

    def split(self) -> Iterator["Piece"]:
        """Yield its parts in each block that it lies in: they may have owners of their own."""
        start = self.start
        while start < self.end:
            end = min(self.end, (start // BLOCK_BYTES + 1) * BLOCK_BYTES)
            yield Piece(self.source, self.info, start, end - start)
            start = end


def object_digest(url: str, etag: Etag) -> bytes:
    """Return 32 bytes that name one version of an object among servers, which exchange no URLs."""
    return hashlib.sha256(f"{url}\n{list(etag)}".encode()).digest()


@lru_cache(1 << 14)
def _object_digest(store: str, info: ObjectInfo) -> bytes:
    return object_digest(f"{store}/{info.key}", info.etag)


def runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces that are read by one request together, in the order of their objects."""
    run: list[Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.key):
        if run and (
            (piece.source.name, piece.info) != (run[0].source.name, run[0].info)
            or piece.start > end + GAP_BYTES
            or piece.end - run[0].start > MAX_RUN_BYTES
        ):
            yield run
            run = []
        end = max(end, piece.end) if run else piece.end
        run.append(piece)
    if run:
        yield run


def part_of(whole: "Future[list[bytes]]", number: int) -> "Future[bytes]":
    """One of several results that come together."""
    part: Future[bytes] = Future()

    def done(found: "Future[list[bytes]]") -> None:
        if found.cancelled():
            part.cancel()
        elif (error := found.exception()) is not None:
            part.set_exception(error)
        else:
            part.set_result(found.result()[number])

    whole.add_done_callback(done)
    return part
