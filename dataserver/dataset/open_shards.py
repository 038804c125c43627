"""The bytes of a dataset's shards: a few open descriptors, and a watch on files that change while they are served."""

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from typing import Final

from crc32c import crc32c as crc32c_of

from dataserver.dataset.cache import LruCache
from dataserver.dataset.errors import DatasetError, ShardReadError, StaleIndexError, cannot_read
from dataserver.dataset.index.external_files import read_external
from dataserver.dataset.index.flags import index_command
from dataserver.dataset.index.format import read_block_sums, read_pages
from dataserver.dataset.index.fresh import IndexedShard
from dataserver.dataset.joined_images import JoinedImages
from dataserver.dataset.shards.external import ExternalTable
from dataserver.dataset.shards.pages import CODECS, STORED, Page, PageTable, begin_bytes, unpack, unpack_begin
from dataserver.dataset.shards.parts import JOINED_START
from dataserver.dataset.storage.blocks import BLOCKS
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.interface import StoredFile
from dataserver.dataset.storage.pieces import BlockKey, Piece, Source, object_digest
from dataserver.dataset.storage.registry import storage_of
from dataserver.dataset.storage.remote import RemoteFile
from dataserver.planning.stream.sliding import PARTS
from dataserver.tracing import span

MAX_OPEN_SHARDS: Final = 128
MAX_REMOTE_SHARDS: Final = 65_536
"""Open shards in stores, which hold no file open; each that is not remembered costs a request."""
MAX_EXTERNAL_IMAGES: Final = 1 << 22
"""Most images in other files, whose places are in memory: 250 bytes each."""
PAGE_CACHE_BYTES: Final = 64 << 20
"""Bytes of decompressed pages: a page is read once for each image in it, at times of their own."""

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
        self._descriptors: LruCache[StoredFile] = LruCache(
            MAX_REMOTE_SHARDS,
            lambda file: 1 if isinstance(file, RemoteFile) else MAX_REMOTE_SHARDS // MAX_OPEN_SHARDS,
        )
        self._tables: LruCache[PageTable] = LruCache(MAX_OPEN_SHARDS, lambda _: 1)
        self._joined = JoinedImages([shard.file for shard in shards], [shard.header for shard in shards])
        self._pages: LruCache[bytes] = LruCache(PAGE_CACHE_BYTES, len)
        """Decompressed, by position of the shard and number of the page."""
        self._external: LruCache[ExternalTable] = LruCache(MAX_EXTERNAL_IMAGES, lambda table: max(len(table.parts), 1))
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
        if shard.file.format.has_external:
            return [self._read_external(position, *one) for one in ranges]
        table = self._tables.get(position, lambda: read_pages(shard.file.index_path, shard.header))
        if not table.pages:
            return self._read_file(position, ranges)
        return [
            self._read_pages(position, table, *one) if one[0] >= end else self._read_file(position, [one])[0]
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

    def coming(self, position: int, ranges: Sequence[tuple[int, int]]) -> "list[Future[bytes]]":
        """What is read ahead of pieces of a shard and is not here: on its way, or failed."""
        size = self.shards[position].header.shard_bytes
        try:
            descriptor = self._descriptor(position)
        except OSError:
            return []
        if not isinstance(descriptor, RemoteFile):
            return []
        return BLOCKS.coming(descriptor.pieces([one for one in ranges if sum(one) <= size]))

    def pieces(self, digest: bytes, ranges: Sequence[tuple[int, int]]) -> list[Piece] | None:
        """Ranges of the object that a digest names; None where no shard is that version. Raises OSError."""
        position = self._digests.get(digest)
        if position is None:
            return None
        descriptor = self._descriptor(position)
        if not isinstance(descriptor, RemoteFile) or descriptor.etag() != self._etags[position]:
            return None
        return descriptor.pieces(ranges)

    def blocks(self, position: int, low: int, high: int) -> list[tuple[BlockKey, Source]]:
        """The blocks of some parts of a shard, as `Dataset.blocks`. Raises OSError."""
        shard = self.shards[position]
        if shard.file.format.has_external:
            return []
        descriptor = self._descriptor(position)
        if not isinstance(descriptor, RemoteFile) or descriptor.etag() != self._etags[position]:
            return []
        size = shard.header.shard_bytes
        return descriptor.blocks(size * low // PARTS, -(-size * high // PARTS))

    @cached_property
    def _digests(self) -> Mapping[bytes, int]:
        """Positions of the shards as they were opened, by what names their objects among servers."""
        return {object_digest(str(shard.file.path), shard.etags[0]): n for n, shard in enumerate(self.shards)}

    def _descriptor(self, position: int) -> StoredFile:
        return self._descriptors.get(position, lambda: self._open(position))

    def _open(self, position: int) -> StoredFile:
        shard = self.shards[position]
        found = shard.file.storage.ranges(shard.file.path)
        if isinstance(found, RemoteFile):
            with suppress(DatasetError):  # of an index that was written anew: reads go on by the one before
                found.prove(read_block_sums(shard.file.index_path, shard.header))
        return found

    def _read_external(self, position: int, address: int, length: int) -> bytes:
        """Read an image in another file; raises as `read`."""
        shard = self.shards[position]
        table = self._external.get(position, lambda: read_external(shard.file, shard.header))
        try:
            part = table.find(address, length)
        except IndexError as error:
            raise ShardReadError(f"{shard.file.path} has no image of {error}; index it again") from error
        path = table.root / part.name
        try:
            storage = storage_of(path)
            storage.check(table.root, part.name)
            (content,) = storage.ranges(path).read([(part.offset, part.length)])
        except OSError as error:
            raise cannot_read(path, error) from error
        if len(content) != part.length or crc32c_of(content) != part.crc32c:
            raise StaleIndexError(
                f"{path} has another content than when {shard.file.path} was indexed;"
                f" run {index_command(shard.file)} and start the server again"
            )
        return content

    def _read_pages(self, position: int, table: PageTable, address: int, length: int) -> bytes:
        """Read a value in compressed pages, which may be parts of one; raises as `read`."""
        path = self.shards[position].file.path
        parts = []
        while length:
            number, start = table.find(address)
            taken = min(length, table.pages[number].plain_bytes - start)
            if taken <= 0:
                raise ShardReadError(f"{path}: {length} bytes at {address} leave its pages; index it again")
            try:
                parts.append(self._read_page(position, number, table.pages[number], start, start + taken))
            except DatasetError:
                raise
            except ValueError as error:
                raise ShardReadError(f"{path} has no page {number} ({error}); index it again") from error
            address, length = address + taken, length - taken
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_page(self, position: int, number: int, page: Page, start: int, end: int) -> bytes:
        """Read a part of a page. Raises ValueError where it is damaged, or as `read`."""
        codec = CODECS[page.codec]
        if codec == STORED:
            return self._read_file(position, [(page.offset + start, end - start)])[0]
        key = position, number

        def unpacked(num_bytes: int) -> bytes:
            is_begin = num_bytes < page.plain_bytes and codec in ("ZSTD", "GZIP")
            taken = begin_bytes(page, num_bytes) if is_begin else page.packed_bytes
            (packed,) = self._read_file(position, [(page.offset, taken)])
            if not is_begin:
                return unpack(packed, page.plain_bytes, codec)
            try:
                return unpack_begin(packed, num_bytes, codec)
            except ValueError:
                if taken == page.packed_bytes:
                    raise
            (packed,) = self._read_file(position, [(page.offset, page.packed_bytes)])
            return unpack_begin(packed, num_bytes, codec)

        found = self._pages.get(key, lambda: unpacked(end))
        if len(found) < end:  # a page that is read for a second image is likely to be read for more
            found = whole = unpacked(page.plain_bytes)
            self._pages.drop(key)
            self._pages.get(key, lambda: whole)
        return found[start:end]

    def _read_file(self, position: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read pieces of the file, each given by its offset and length; raises as `read`."""
        file = self.shards[position].file  # its path is made where it is wanted: that takes as long as the reading
        try:
            for _ in range(2):
                descriptor = self._descriptor(position)
                with span("read shard", pieces=len(ranges)):
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
            raise cannot_read(file.path, error) from error
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
                raise cannot_read(self.shards[position].file.path, error) from error

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
