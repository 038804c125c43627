"""Object stores, HTTP servers and the Hub as storages: versions compared on every read, retries, blocks."""

import errno
import io
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from io import BufferedIOBase
from itertools import islice
from pathlib import Path, PurePath
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as crc32c_of

from dataserver.dataset.cache import LruCache
from dataserver.dataset.storage.blocks import BLOCKS
from dataserver.dataset.storage.client_interface import ChangedError, Client, ObjectInfo, UnavailableError
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.interface import Entry, EntryKind, StoredFile
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece, Source
from dataserver.dataset.storage.retries import RetryBudget
from dataserver.dataset.storage.schemes import SCHEMES
from dataserver.dataset.storage.seekable_file import SeekableFile
from dataserver.dataset.storage.urls import Url, as_url
from dataserver.tracing import Kind, span

AHEAD: Final = 3
"""Blocks that are asked for ahead of who reads a file from its first byte to its last."""
SMALL_BYTES: Final = 16 << 20
"""A file of no more is read as a whole, and held for who reads it next: sidecars are read several times."""
SMALL_CACHE_BYTES: Final = 64 << 20
MAX_SEEN: Final = 1 << 16
"""Objects of a store that are remembered as it showed them last, so that to open one costs no request."""
CHUNK: Final = 10_000
"""Objects of a listing that are taken at a time, so that trouble costs no more than these."""
MAX_REFUSED: Final = 1 << 16
"""Blocks of a store that are remembered as not those that were indexed."""
REFUSED_S: Final = 300.0
"""Seconds for which such a block is not read as a whole again, unless the object gets another version."""
CHANGED: Final = Etag(0, 0, -1, 0, 0)
"""The state of no object."""
_BUFFER_BYTES: Final = 1 << 20
_log = logging.getLogger(__name__)


class Store:
    """One bucket or server: what it is asked, within its retry budget. Thread-safe."""

    def __init__(self, name: str, client: Client) -> None:
        self.name = name
        self.client = client
        self.budget = RetryBudget(name)
        self.small: LruCache[bytes] = LruCache(SMALL_CACHE_BYTES, len)
        self.refused = _Refused()
        self._seen: LruCache[ObjectInfo] = LruCache(MAX_SEEN, lambda _: 1)

    def head(self, key: str) -> ObjectInfo:
        """Return the present version of an object, and note it."""
        return self._noted(self.budget.call(lambda: self.client.head(key)))

    def seen(self, key: str) -> ObjectInfo:
        """An object as it was shown last, which reading it compares: asked for only where it never was."""
        return self._seen.get(key, lambda: self.budget.call(lambda: self.client.head(key)))

    def _noted(self, info: ObjectInfo) -> ObjectInfo:
        self._seen.drop(info.key)
        return self._seen.get(info.key, lambda: info)

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        """Read a range of an object, as `Client.get`. An object that changed is asked for anew when it is opened
        next."""
        if not length:
            return b""
        try:
            with span("read store", Kind.CLIENT, bytes=length):
                return self.budget.call(lambda: self.client.get(wanted, start, length))
        except ChangedError:
            self._seen.drop(wanted.key)
            raise

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects below a folder. Raises OSError where the store lists the same ones for ever."""
        listing, seen = _Listing(self.client, prefix), set[str]()
        while chunk := self.budget.call(listing.chunk):
            if chunk[0].key in seen:
                raise OSError(errno.EINVAL, f"{self.name} lists {chunk[0].key} again and again: its listing never ends")
            seen.add(chunk[0].key)
            yield from map(self._noted, chunk)
            if len(chunk) < listing.most:
                return

    def has(self, prefix: str) -> bool:
        """Return whether there is an object below a folder."""
        return self.budget.call(lambda: next(self.client.objects(prefix, ""), None)) is not None

    def small_file(self, info: ObjectInfo) -> bytes:
        """Read a small object as a whole; it is held for a while."""
        return self.small.get(info, lambda: self.get(info, 0, info.num_bytes))

    def sequential(self, info: ObjectInfo, holds_blocks: bool = False) -> BufferedIOBase:
        """Open one version of an object for reading from the first byte on; blocks are read ahead."""
        return io.BufferedReader(_Sequential(self, info, holds_blocks), _BUFFER_BYTES)


class _Listing:
    """One walk through a listing, a chunk at a time: what fails goes on behind the last object that was taken."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client, self._prefix = client, prefix
        self.most: float = math.inf if client.lists_at_once else CHUNK
        """Objects of a chunk that is not the last."""
        self._after = ""
        self._open: Iterator[ObjectInfo] | None = None

    def chunk(self) -> list[ObjectInfo]:
        """Take the next objects; none behind the last one. Raises OSError."""
        if self._open is None:
            self._open = self._client.objects(self._prefix, self._after)
        try:
            found = list(self._open if self._client.lists_at_once else islice(self._open, CHUNK))
        except OSError:
            self._open = None
            raise
        self._after = found[-1].key if found else self._after
        return found


class _Refused:
    """Blocks that were not what an index says: version, number and wanted checksum of each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen_s: dict[tuple[ObjectInfo, int, int], float] = {}

    def __contains__(self, key: tuple[ObjectInfo, int, int]) -> bool:
        """Whether a block was refused a short time ago."""
        at = self._seen_s.get(key)
        return at is not None and time.monotonic() < at + REFUSED_S

    def add(self, key: tuple[ObjectInfo, int, int]) -> bool:
        """Remember a block that was refused now. Returns whether it was for the first time."""
        with self._lock:
            is_first = self._seen_s.pop(key, None) is None
            self._seen_s[key] = time.monotonic()
            if len(self._seen_s) > MAX_REFUSED:
                del self._seen_s[next(iter(self._seen_s))]
            return is_first


class _Proven:
    """A store of whose answers whole blocks of one object are compared with checksums. Fulfils `Source`."""

    def __init__(self, store: Store, sums: npt.NDArray[np.uint32]) -> None:
        self.name = store.name
        self._store = store
        self._sums = sums

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        """As `Store.get`. Raises UnavailableError where a block is not the one that was indexed."""
        number, rest = divmod(start, BLOCK_BYTES)
        if rest or length != min(BLOCK_BYTES, wanted.num_bytes - start) or number >= len(self._sums):
            return self._store.get(wanted, start, length)
        wanted_sum = int(self._sums[number])
        key = wanted, number, wanted_sum
        what = f"block {number} of {self.name}/{wanted.key} differs from what was indexed"
        if key in self._store.refused:
            raise UnavailableError(what)
        data = self._store.get(wanted, start, length)
        if crc32c_of(data) != wanted_sum:
            if self._store.refused.add(key):
                _log.warning("%s; it is not held, and its images are read one by one", what)
            raise UnavailableError(what)
        return data


class RemoteFile:
    """One version of an object, read by ranges. It holds nothing open."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self._store = store
        self._source: Source = store
        self._info = info
        self._etag = info.etag  # a hash: asked for with every image

    def prove(self, sums: npt.NDArray[np.uint32]) -> None:
        """Compare blocks with these checksums before they are held."""
        if len(sums):
            self._source = _Proven(self._store, sums)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read pieces as `StoredFile.read`; nothing where the object changed, as `etag` tells."""
        info = self._info
        whole = [(start, min(length, info.num_bytes - start)) for start, length in ranges]
        wanted = [Piece(self._source, info, start, length) for start, length in whole if length > 0]
        try:
            found = iter(BLOCKS.read(wanted))
        except ChangedError:
            self._etag = CHANGED
            return [b""] * len(ranges)
        return [next(found) if length > 0 else b"" for _, length in whole]

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> list[Piece]:
        """Ranges that lie in the object, as pieces."""
        size = self._info.num_bytes
        return [Piece(self._source, self._info, s, length) for s, length in ranges if 0 < length <= size - s]

    def blocks(self, low: int, high: int) -> list[tuple[BlockKey, Source]]:
        """The blocks in which some bytes lie."""
        numbers = range(low // BLOCK_BYTES, -(-min(high, self._info.num_bytes) // BLOCK_BYTES))
        return [(BlockKey(self._store.name, self._info, number), self._source) for number in numbers]

    def etag(self) -> Etag:
        """Return the state that was read, or `CHANGED` where another one was met."""
        return self._etag


class RemoteStorage:
    """All stores of one scheme. Their clients are made when they are first asked."""

    is_local = False

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self.holds_indexes = SCHEMES[scheme].can_write
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}

    def store(self, url: Url) -> Store:
        """The store that a URL lies in. Raises DatasetError where it cannot be opened."""
        with self._lock:
            found = self._stores.get(url.store)
            if found is None:
                name = f"{self._scheme}://{url.store}"
                found = self._stores[url.store] = Store(name, SCHEMES[self._scheme].client(self._scheme, url.store))
            return found

    def is_file(self, path: PurePath) -> bool:
        """Return whether a URL names one object rather than a prefix."""
        url = _url(path)
        store = self.store(url)
        missing = FileNotFoundError(errno.ENOENT, f"{store.name} has nothing there")
        if SCHEMES[self._scheme].can_list:
            try:
                if store.has(url.key):
                    return False
            except FileNotFoundError as error:
                missing = error
            if not url.key:
                raise missing
        try:
            store.head(url.key)
        except FileNotFoundError as error:
            raise (missing if SCHEMES[self._scheme].can_list else error) from None
        return True

    def walk(self, root: PurePath) -> Iterator[Entry]:
        """Yield all objects below a prefix but those of hidden names."""
        url = _url(root)
        begin = f"{url.key}/" if url.key else ""
        for info in self.store(url).objects(url.key):
            name = info.key.removeprefix(begin)
            if not any(part.startswith(".") and part.strip(".") for part in name.split("/")):
                yield Entry(name, EntryKind.FILE, info.etag)

    def check(self, root: PurePath, name: str) -> None:
        """Accept every name, since objects are no links."""

    def etag(self, path: str) -> Etag:
        """Return the state of an object, asked for anew."""
        url = _url(PurePath(path))
        return self.store(url).head(url.key).etag

    def open(self, path: PurePath, holds_blocks: bool = False) -> BufferedIOBase:
        """Open an object for reading from the first byte on; blocks are read ahead."""
        url = _url(path)
        store = self.store(url)
        info = store.head(url.key)
        if info.num_bytes <= SMALL_BYTES and not holds_blocks:
            return io.BytesIO(store.small_file(info))
        return store.sequential(info, holds_blocks)

    def ranges(self, path: PurePath) -> RemoteFile:
        """Open an object for reading by ranges."""
        url = _url(path)
        store = self.store(url)
        return RemoteFile(store, store.seen(url.key))

    def read_ahead(self, wanted: Sequence[tuple[StoredFile, Sequence[tuple[int, int]]]]) -> None:
        """Begin to read the blocks of those files that lie in a store."""
        BLOCKS.read_ahead(
            [piece for file, ranges in wanted if isinstance(file, RemoteFile) for piece in file.pieces(ranges)]
        )

    def write(self, url: Url, source: Path) -> ObjectInfo:
        """Write an object from a local file. Raises OSError."""
        store = self.store(url)
        return store.budget.call(lambda: store.client.put(url.key, source))


class _Sequential(SeekableFile):
    """One version of an object from its first byte to its last, each asked for once; what is sought is read singly."""

    def __init__(self, store: Store, info: ObjectInfo, holds_blocks: bool) -> None:
        super().__init__(info.num_bytes)
        self._store = store
        self._info = info
        self._holds_blocks = holds_blocks
        self._next = 0
        """Where reading in order goes on."""
        self._blocks: deque[tuple[int, Future[bytes]]] = deque()
        """By number: the block in hand, and those that were asked for ahead."""

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        """Read up to the end of a block."""
        length = min(len(buffer), self._num_bytes - self._at)
        if length <= 0:
            return 0
        number, start = divmod(self._at, BLOCK_BYTES)
        in_order = self._at == self._next
        if in_order or any(n == number for n, _ in self._blocks):
            data = memoryview(self._block(number))[start : start + length]
        elif self._holds_blocks:
            data = memoryview(BLOCKS.read([Piece(self._store, self._info, self._at, length)])[0])
        else:
            data = memoryview(self._store.get(self._info, self._at, length))
        buffer[: len(data)] = data
        self._at += len(data)
        if in_order:
            self._next = self._at
        return len(data)

    def _block(self, number: int) -> bytes:
        while self._blocks and self._blocks[0][0] != number:
            self._blocks.popleft()[1].cancel()
        following = self._blocks[-1][0] + 1 if self._blocks else number
        for ahead in range(following, number + 1 + AHEAD):
            if ahead * BLOCK_BYTES < self._info.num_bytes:
                key = BlockKey(self._store.name, self._info, ahead)
                self._blocks.append((ahead, BLOCKS.read_whole(key, self._store, self._holds_blocks)))
        found = self._blocks[0][1]
        if found.cancelled():  # no thread could be started for it
            found = Future()
            key = BlockKey(self._store.name, self._info, number)
            found.set_result(self._store.get(self._info, number * BLOCK_BYTES, key.num_bytes))
            self._blocks[0] = number, found
        return found.result()

    def close(self) -> None:
        """Close the file; no further request is sent."""
        for _, future in self._blocks:
            future.cancel()
        self._blocks.clear()
        super().close()


def _url(path: PurePath) -> Url:
    found = path if isinstance(path, Url) else as_url(path)
    assert found is not None, path
    return found
