"""The bytes of images in joined files: where they lie stands beside the index, and what they must be in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from dataserver.dataset.cache import LruCache
from dataserver.dataset.errors import ShardReadError, StaleIndexError, cannot_read
from dataserver.dataset.index.flags import index_command
from dataserver.dataset.index.format import IndexHeader, read_joined
from dataserver.dataset.index.joins import found_joined
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.parts import JoinedFile, split_address
from dataserver.dataset.storage.digests import digest_file
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.interface import StoredFile
from dataserver.dataset.storage.registry import storage_of

MAX_OPEN_FILES: Final = 128


class _Opened(NamedTuple):
    path: Path
    file: StoredFile
    etag: Etag
    """State for which the content is known to be the one that was indexed."""


class _Noted(NamedTuple):
    """What lies beside an index of one file, which never changes while the dataset is open."""

    path: Path
    state: tuple[int, int, int]
    """Size, mtime and ctime (nanoseconds) with which the file was indexed."""
    wanted: JoinedFile


class JoinedImages:
    """Reads joined files whose content is what indexes describe; may be used by several threads.

    Every read compares the file's etag with the one for which that is known. A file with the times that the index notes
    is known; any other is read whole once.
    """

    def __init__(self, files: Sequence[ShardFile], headers: Sequence[IndexHeader]) -> None:
        self._files = files
        self._headers = headers
        self._opened: LruCache[_Opened] = LruCache(MAX_OPEN_FILES, lambda _: 1)
        self._compared: dict[tuple[int, int], tuple[Etag, bool]] = {}
        """The last state of each file that was compared with its index, and whether the content is the same."""
        self._noted: dict[tuple[int, int], _Noted] = {}

    def read(self, position: int, address: int, length: int) -> bytes:
        """Read a piece of a file that is joined to the shard at `position`; `address` is as `joined_address`.

        Raises:
            ShardReadError: storage failed, or gave fewer bytes than the file has; says nothing about the sample.
            StaleIndexError: the file has another content than the one that was indexed.
        """
        number, offset = split_address(address)
        for _ in range(2):
            opened = self._opened.get((position, number), lambda: self._open(position, number))
            try:
                (data,) = opened.file.read([(offset, length)])
                etag = opened.file.etag()  # after the read: it was so all the time
            except OSError as error:
                self._opened.drop((position, number))
                raise cannot_read(opened.path, error) from error
            if etag == opened.etag:
                break
            self._opened.drop((position, number))
        else:
            raise ShardReadError(f"{opened.path} changes while it is read; index again when it is complete")
        if len(data) != length:
            raise ShardReadError(f"{opened.path} gave {len(data)} of {length} bytes at {offset}; was it cut?")
        return data

    def _open(self, position: int, number: int) -> _Opened:
        shard = self._files[position]
        path, state, wanted = self._noted.get((position, number)) or self._note(position, number)
        try:
            file = storage_of(path).ranges(path)
            etag = file.etag()
            before, is_same = self._compared.get((position, number), (None, False))
            if before != etag:
                is_known = state == (etag.num_bytes, etag.mtime_ns, etag.ctime_ns)
                is_same = etag.num_bytes == wanted.num_bytes and (is_known or digest_file(path) == wanted.sha256)
                self._compared[position, number] = etag, is_same
        except OSError as error:
            raise ShardReadError(f"cannot read {path}, which is joined: {error}; check the storage") from error
        if not is_same:
            raise StaleIndexError(
                f"{path}, which is joined to {shard.path}, has another content than the one that was indexed;"
                f" run {index_command(shard)} and start the server again"
            )
        return _Opened(path, file, etag)

    def _note(self, position: int, number: int) -> _Noted:
        shard, header = self._files[position], self._headers[position]
        try:
            path, state = found_joined(shard, header, number)
            wanted = next(one for one in read_joined(shard.index_path, header) if one.number == number)
        except (OSError, ValueError, LookupError, StopIteration) as error:
            raise StaleIndexError(
                f"shard {shard.path} has images in other files, and {shard.index_path} does not say where ({error!r});"
                f" run {index_command(shard)} and start the server again"
            ) from error
        noted = self._noted[position, number] = _Noted(path, state, wanted)
        return noted
