"""What a storage backend offers. Servers map indexes from local files; shards and their sidecars may lie elsewhere."""

from collections.abc import Iterator, Sequence
from enum import Enum
from io import BufferedIOBase
from pathlib import PurePath
from typing import NamedTuple, Protocol

from dataserver.dataset.storage.etags import Etag


class EntryKind(Enum):
    """What a listing found under a name."""

    FILE = "file"
    LINK = "link"
    """A link, or else no regular file: `Storage.check` says whether it may be used."""
    FOLDER_LINK = "folder link"
    """A link to a folder. Listings do not follow it."""


class Entry(NamedTuple):
    """One name below the root of a dataset."""

    name: str
    """Path relative to the root, with slashes."""
    kind: EntryKind
    etag: Etag | None = None
    """State of the file, where listing tells it."""


class StoredFile(Protocol):
    """One open file, read by ranges and by several threads. It closes when nobody refers to it."""

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read pieces, each given by offset and length; fewer bytes where the file ends. Raises OSError."""

    def etag(self) -> Etag:
        """Return the state of the file. Raises OSError."""


class Storage(Protocol):
    """A storage backend. Errors are OSErrors, with an `errno` where storage failed and not the file itself."""

    is_local: bool
    """Whether its files lie on this machine, or are mounted."""
    holds_indexes: bool
    """Whether the index can lie beside the shards."""

    def is_file(self, path: PurePath) -> bool:
        """Return whether a path names one file rather than a folder. Raises OSError where there is neither."""

    def walk(self, root: PurePath) -> Iterator[Entry]:
        """Yield all names below a folder, in any order; hidden ones may be left out. Raises OSError."""

    def check(self, root: PurePath, name: str) -> None:
        """Raise DatasetError if an entry that is no plain file cannot be used as one."""

    def etag(self, path: str) -> Etag:
        """Return the state of a file, without reading it. Raises OSError."""

    def open(self, path: PurePath, holds_blocks: bool = False) -> BufferedIOBase:
        """Open a file for sequential reading; it can seek. Raises OSError.

        Args:
            path: the file.
            holds_blocks: whether parts of the file are read by others, too: what was read of a store is held for these.
        """

    def ranges(self, path: PurePath) -> StoredFile:
        """Open a file for reading by ranges. Raises OSError."""

    def read_ahead(self, wanted: Sequence[tuple[StoredFile, Sequence[tuple[int, int]]]]) -> None:
        """Begin to read pieces of open files that will be wanted soon, if that gains time. What fails is said then."""
