"""What a store is asked for, one request each: `remote.py` adds retries, versions and caches, alike for all stores."""

import errno
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from dataserver.dataset.storage.etags import Etag


class ObjectInfo(NamedTuple):
    """One object of a store, as a listing or a request for its head shows it."""

    key: str
    num_bytes: int
    version: str
    """ETag as the store writes it; empty where it gives none."""
    modified_ns: int
    """Time of the last upload, whole seconds in nanoseconds; 0 where it is not given."""

    @property
    def etag(self) -> Etag:
        """The version; the date counts only where the store gives no ETag: the same upload may come again."""
        if not self.version:
            return Etag(0, 0, self.num_bytes, self.modified_ns, self.modified_ns)
        word = int.from_bytes(hashlib.sha256(self.version.encode()).digest()[:8], "little") >> 1
        return Etag(0, 0, self.num_bytes, word, 0)


class UnavailableError(OSError):
    """A store does not do what it was asked for at present; to ask again may help."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(errno.EIO, why)
        self.retry_after_s = retry_after_s
        """What the store asked to wait for, where it did."""


class ChangedError(OSError):
    """An object is not the version that was asked for."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ESTALE, f"it changed: {what}")


class Client(Protocol):
    """Requests to one store; thread-safe. Every method asks once, within a bounded time.

    Errors are OSErrors: FileNotFoundError, PermissionError, UnavailableError where to ask again may help, others where
    it does not. Their texts hold no secret.
    """

    lists_at_once: bool
    """Whether `objects` gives all of them, whatever `after` is."""

    def objects(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Yield all objects below a folder: in order those behind the key `after`, or all at once if they are few."""

    def head(self, key: str) -> ObjectInfo:
        """Return the present version of an object."""

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        """Read a range that lies in an object. Raises ChangedError where the object has another version."""

    def put(self, key: str, source: Path) -> ObjectInfo:
        """Write an object from a local file."""

    def remove(self, key: str) -> None:
        """Remove an object from the store."""


def check_version(wanted: ObjectInfo, version: str, num_bytes: int, modified_ns: int) -> None:
    """Raise ChangedError unless an answer is of the version that was asked for."""
    if num_bytes != wanted.num_bytes:
        raise ChangedError(f"it has {num_bytes} bytes instead of {wanted.num_bytes}")
    if wanted.version and version != wanted.version:
        raise ChangedError("it has another ETag")
    if not wanted.version and modified_ns != wanted.modified_ns:
        raise ChangedError("it has another date")


def check_length(data: bytes, length: int) -> bytes:
    """Return what was read. Raises UnavailableError where it is not as long as what was asked for."""
    if len(data) != length:
        raise UnavailableError(f"an answer has {len(data)} bytes instead of {length}")
    return data
