"""The bytes of a dataset's shards: a few open descriptors, and a watch on files that change while they are served."""

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

from dataserver.dataset.cache import LruCache
from dataserver.dataset.errors import DatasetError, ShardReadError, StaleIndexError
from dataserver.dataset.index.flags import index_command
from dataserver.dataset.index.format import read_pages
from dataserver.dataset.index.fresh import IndexedShard
from dataserver.dataset.joined_images import JoinedImages
from dataserver.dataset.shards.pages import CODECS, Page, PageTable, unpack
from dataserver.dataset.shards.parts import JOINED_START
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.interface import StoredFile
from dataserver.dataset.storage.pieces import Piece, object_digest
from dataserver.dataset.storage.remote import RemoteFile

MAX_OPEN_SHARDS: Final = 128
PAGE_CACHE_BYTES: Final = 64 << 20
"""Of decompressed pages: a page is read once for each image in it, at times of their own."""

_log = logging.getLogger(__name__)


class OpenShards:
    """Reads shards whose content is what their indexes describe; may be used by several threads.

    Every read compares the file's etag with the one for which that is known. Where they differ, or none is known yet,
    the contents of the shard and its sidecar are read and compared with the index once.
    """

    def __init__(self, shards: Sequence[IndexedShard]) -> None:
        self.shards = shards
        self._etags = [shard.etags[0] if shard.is_known else None for shard in shards]
        """By position: the etag whose content is known to be that of the index."""
        self._refused: dict[int, Etag] = {}
        """By position: the etag whose content is known to be another one."""
        self._descriptors: LruCache[StoredFile] = LruCache(MAX_OPEN_SHARDS, lambda _: 1)
        self._tables: LruCache[PageTable] = LruCache(MAX_OPEN_SHARDS, lambda _: 1)
        self._joined = JoinedImages([shard.file for shard in shards], [shard.header for shard in shards])
        self._pages: LruCache[bytes] = LruCache(PAGE_CACHE_BYTES, len)
        """Decompressed, by position of the shard and number of the page."""
        self._checking = [threading.Lock() for _ in shards]

    def read(self, position: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read pieces of the shard at `position`, each given by its address (an offset, or as `PageTable`
        or `joined_address`) and length.

        Raises:
            ShardReadError: storage failed, or gave fewer bytes than the file has; says nothing about the sample.
            StaleIndexError: the shard has another content than the one that was indexed.
        """
        shard = self.shards[position]
        end = shard.header.shard_bytes
        if any(address >= JOINED_START for address, _ in ranges):
            return [
                self._joined.read(position, *one) if one[0] >= JOINED_START else self.read(position, [one])[0]
                for one in ranges
            ]
        if all(address < end for address, _ in ranges):
            return self._read_file(position, ranges)
        table = self._tables.get(position, lambda: read_pages(shard.file.index_path, shard.header))
        if not table.pages:
            return self._read_file(position, ranges)
        return [
            self._read_page(position, table, *one) if one[0] >= end else self._read_file(position, [one])[0]
            for one in ranges
        ]

    def read_ahead(self, wanted: Sequence[tuple[int, int, int]]) -> None:
        """Begin to read pieces that will be wanted soon, by position, address and length. What fails is said then."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for position, address, length in wanted:
            if address + length <= self.shards[position].header.shard_bytes:
                ranges.setdefault(position, []).append((address, length))
        try:
            files = [(self._descriptor(position), some) for position, some in ranges.items()]
        except OSError as error:
            _log.debug("nothing is read ahead: %s", error)
            return
        if files:
            self.shards[0].file.storage.read_ahead(files)

    def pieces(self, digest: bytes, ranges: Sequence[tuple[int, int]]) -> list[Piece] | None:
        """Ranges of the object that a digest names; None where no shard is that version. Raises OSError."""
        position = self._digests.get(digest)
        if position is None:
            return None
        descriptor = self._descriptor(position)
        if not isinstance(descriptor, RemoteFile) or descriptor.etag() != self._etags[position]:
            return None
        return descriptor.pieces(ranges)

    @cached_property
    def _digests(self) -> Mapping[bytes, int]:
        """Positions of the shards as they were opened, by what names their objects among servers."""
        return {object_digest(str(shard.file.path), shard.etags[0]): n for n, shard in enumerate(self.shards)}

    def _descriptor(self, position: int) -> StoredFile:
        file = self.shards[position].file
        return self._descriptors.get(position, lambda: file.storage.ranges(file.path))

    def _read_page(self, position: int, table: PageTable, address: int, length: int) -> bytes:
        """Read a value in a compressed page; raises as `read`."""
        path = self.shards[position].file.path
        number, start = table.find(address)
        try:
            page = self._pages.get((position, number), lambda: self._unpack(position, table.pages[number]))
        except DatasetError:
            raise
        except ValueError as error:
            raise ShardReadError(f"{path} has no page {number} ({error}); index it again") from error
        if start + length > len(page):
            raise ShardReadError(f"{path}: {length} bytes at {address} leave their page; index it again")
        return page[start : start + length]

    def _unpack(self, position: int, page: Page) -> bytes:
        (packed,) = self._read_file(position, [(page.offset, page.packed_bytes)])
        return unpack(packed, page.plain_bytes, CODECS[page.codec])

    def _read_file(self, position: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read pieces of the file, each given by its offset and length; raises as `read`."""
        file = self.shards[position].file  # its path is made where it is wanted: that takes as long as the reading
        try:
            for _ in range(2):
                descriptor = self._descriptor(position)
                pieces = descriptor.read(ranges)
                etag = descriptor.etag()  # after the reads: it was so all the time
                if etag == self._etags[position]:
                    break
                self._descriptors.drop(position)
                self._check(position)
            else:
                raise ShardReadError(f"{file.path} changes while it is read; index it again when it is complete")
        except OSError as error:
            self._descriptors.drop(position)
            raise ShardReadError(f"cannot read {file.path}: {error}; check the storage") from error
        for data, (offset, length) in zip(pieces, ranges, strict=True):
            if len(data) != length:
                raise ShardReadError(
                    f"{file.path} gave {len(data)} of {length} bytes at {offset}; was it cut? index it again"
                )
        return pieces

    def confirm(self, position: int) -> None:
        """Compare a shard with its index, if that was never done: for what is served from the index alone.

        Raises as `read`.
        """
        if self._etags[position] is None:
            try:
                self._check(position)
            except OSError as error:
                raise ShardReadError(
                    f"cannot read {self.shards[position].file.path}: {error}; check the storage"
                ) from error

    def _check(self, position: int) -> None:
        """Compare a shard that is not known, or changed, with its index. Raises OSError, or what `read` raises."""
        shard = self.shards[position]
        path, before = shard.file.path, self._etags[position]
        happened = "may have changed since it was indexed" if before is None else "changed while it was served"
        with self._checking[position]:  # however many threads wait for a shard, it is read once
            etag = shard.file.storage.etag(str(path))
            if etag == self._etags[position]:
                return
            if etag.num_bytes != shard.header.shard_bytes:
                raise StaleIndexError(
                    f"{path} has {etag.num_bytes} bytes, its index describes {shard.header.shard_bytes};"
                    f" run {index_command(shard.file)} and start the server again"
                )
            if etag != self._refused.get(position):
                _log.log(
                    logging.INFO if before is None else logging.WARNING,
                    "%s %s; its content is compared with its index",
                    *(path, happened),
                )
                if shard.changed_file() is None:
                    self._etags[position] = etag
                    return
                self._refused[position] = etag
        raise StaleIndexError(
            f"{path} {happened}, its index describes another content;"
            f" run {index_command(shard.file)} and start the server again"
        )
