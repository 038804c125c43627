"""Blocks in a folder on a local disk, which processes of one user share.

A file is written under another name and renamed, and never changes. It holds checksums of each 64 KiB, which every read
compares: a file that is torn, cut or decayed is removed and its block read from the store again. Nothing is synced.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import struct
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from time import monotonic, time
from typing import Final

from crc32c import crc32c as crc32c_of

from dataserver.dataset.storage.pieces import BlockKey
from dataserver.dataset.storage.trusted_folder import own_folder
from dataserver.outputs import TEMP_SUFFIX

SUFFIX: Final = ".block"
CHUNK_BYTES: Final = 1 << 16
_TRAILER: Final = struct.Struct("<8sQI")
"""Magic, bytes of the block, checksum of the table and the key before it."""
_MAGIC: Final = b"dtblock1"
_NETWORK: Final = re.compile(
    r"(?:fuse\.)?(?:nfs4?|cifs|smb3|ceph|ceph-fuse|lustre|gpfs|glusterfs|9p|afs|beegfs\w*|wekafs|sshfs|s3fs|gcsfuse|juicefs)"
)
"""Kinds of file systems, as mounts name them."""
_MOUNTS: Final = Path("/proc/self/mounts")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
"""A space, tab, line break or backslash in the name of a mount."""
LOOK_EVERY_S: Final = 30.0
"""The folder is listed so often: other processes write there, too."""
SPARE_PART: Final = 64
"""Where the folder is full, one part in so many is emptied of blocks that nobody needs, so that it need not be listed
for each block: of 64 GiB that took as long as reading the block."""
PAUSE_S: Final = 30.0
"""Nothing is written for so long after the disk refused something."""
_TEMP_LIFETIME_S: Final = 3600.0
"""A block is written within seconds; what is older was left by a killed process."""

_log = logging.getLogger(__name__)


class BlockFiles:
    """A folder of files with blocks. Thread-safe."""

    def __init__(self, folder: Path, most: int) -> None:
        """Use a folder, which is made where it is missing.

        Args:
            folder: where files lie.
            most: bytes of all together.

        Raises:
            DatasetError: others could write there, or this user cannot.
        """
        self.most = most
        self._folder = folder
        self._lock = threading.Lock()
        self._used = 0
        self._looked_at = -LOOK_EVERY_S
        self._paused_until = 0.0
        own_folder(folder, "--block-cache-dir")
        self._sweep()
        kind = _file_system(folder)
        if _NETWORK.fullmatch(kind):
            _log.warning("--block-cache-dir %s is on a network file system (%s); a local disk is faster", folder, kind)

    def has(self, key: BlockKey) -> bool:
        """Whether there is a file for a block; it may turn out to be damaged. A disk that fails has none."""
        return os.path.isfile(self._path(key))  # noqa: PTH113  `Path.is_file` raises the errors of a disk

    def read(self, key: BlockKey, start: int, length: int) -> bytes | None:
        """Return bytes of a block; None where it is not there, or not whole."""
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            found = _checked(descriptor, key, start, length)
        except OSError as error:
            _log.warning("%s cannot be read (%s); its block is read from the store", path, error.strerror)
            return None
        finally:
            os.close(descriptor)
        if found is None:
            _log.warning("%s is damaged; it is removed, and its block read from the store again", path)
            with contextlib.suppress(OSError):
                path.unlink()
        return found

    def write(self, key: BlockKey, data: bytes, needed: Callable[[], Iterable[BlockKey]] = tuple) -> None:
        """Keep a block, where the disk takes it. Where the folder is full, `needed` tells which blocks go last."""
        now = monotonic()
        with self._lock:
            if now < self._paused_until or len(data) > self.most or self.has(key):
                return
        tail = _tail(key, data)
        num_bytes = len(data) + len(tail)
        path = self._path(key)
        temp = path.with_name(f"{path.stem[:16]}{secrets.token_hex(8)}{TEMP_SUFFIX}")
        try:
            self._make_room(num_bytes, needed)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123  of a descriptor
                for part in (data, tail):
                    if file.write(part) != len(part):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temp.rename(path)
            with self._lock:
                self._used += num_bytes
        except OSError as error:
            with contextlib.suppress(OSError):
                temp.unlink()
            with self._lock:
                self._paused_until = now + PAUSE_S
            _log.warning(
                "--block-cache-dir %s: a block cannot be written (%s); none are for %.0f s",
                *(self._folder, error.strerror, PAUSE_S),
            )

    def _make_room(self, num_bytes: int, needed: Callable[[], Iterable[BlockKey]]) -> None:
        """Remove files where the folder would be too full: those of needed blocks last, and of each kind the oldest.

        Of needed blocks no more go than must.
        """
        with self._lock:
            full = self._used + num_bytes > self.most
            if not full and monotonic() < self._looked_at + LOOK_EVERY_S:
                return
            files = self._list()
            self._used = sum(size for _, size, _ in files)
            self._looked_at = monotonic()
            if self._used + num_bytes <= self.most:
                return
            last = {str(self._path(key)) for key in needed()}
            files.sort(key=lambda file: (file[2] in last, file))
            for _, size, path in files:
                spare = 0 if path in last else self.most // SPARE_PART
                if self._used + num_bytes <= self.most - spare:
                    break
                with contextlib.suppress(FileNotFoundError):  # another process was quicker
                    os.unlink(path)  # noqa: PTH108
                self._used -= size

    def _list(self) -> list[tuple[float, int, str]]:
        """Time of writing, size and path of all files."""
        found = []
        for folder in os.scandir(self._folder):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        if entry.name.endswith(SUFFIX):
                            found.append((about.st_mtime, about.st_size, entry.path))
        return found

    def _sweep(self) -> None:
        """Remove what killed writers left behind."""
        for path in self._folder.glob(f"??/*{TEMP_SUFFIX}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time() - _TEMP_LIFETIME_S:
                    path.unlink()

    def _path(self, key: BlockKey) -> Path:
        return self._folder / _name(key)


@lru_cache(1 << 14)
def _name(key: BlockKey) -> str:
    """Name of a block's file, in a folder below the cache's."""
    name = hashlib.sha256(repr(key).encode()).hexdigest()
    return f"{name[:2]}/{name[2:]}{SUFFIX}"


def _tail(key: BlockKey, data: bytes) -> bytes:
    """What stands behind the bytes of a block."""
    table = b"".join(
        crc32c_of(data[i : i + CHUNK_BYTES]).to_bytes(4, "little") for i in range(0, len(data), CHUNK_BYTES)
    )
    return table + _TRAILER.pack(_MAGIC, len(data), crc32c_of(table + repr(key).encode()))


def _checked(descriptor: int, key: BlockKey, start: int, length: int) -> bytes | None:
    """Bytes of a block whose checksums are right; None where they are not."""
    num_bytes = key.num_bytes
    num_chunks = -(-num_bytes // CHUNK_BYTES)
    tail = os.pread(descriptor, 4 * num_chunks + _TRAILER.size + 1, num_bytes)
    if len(tail) != 4 * num_chunks + _TRAILER.size:
        return None
    table, trailer = tail[: 4 * num_chunks], tail[4 * num_chunks :]
    if trailer != _TRAILER.pack(_MAGIC, num_bytes, crc32c_of(table + repr(key).encode())):
        return None
    first, last = start // CHUNK_BYTES, (start + length - 1) // CHUNK_BYTES
    low, high = first * CHUNK_BYTES, min((last + 1) * CHUNK_BYTES, num_bytes)
    data = os.pread(descriptor, high - low, low)
    if len(data) != high - low:
        return None
    for number in range(first, last + 1):
        at = (number - first) * CHUNK_BYTES
        word = int.from_bytes(table[4 * number : 4 * number + 4], "little")
        if crc32c_of(data[at : at + CHUNK_BYTES]) != word:
            return None
    return data[start - low : start - low + length]


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on; empty where it cannot be told."""
    real, best, kind = os.path.realpath(folder), "", ""
    with contextlib.suppress(OSError), _MOUNTS.open(errors="surrogateescape") as mounts:
        for line in mounts:
            _, escaped, found, *_ = line.split(" ")
            point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), escaped)
            if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                best, kind = point, found
    return kind
