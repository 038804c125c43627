"""The file system of this machine, or one that is mounted."""

import os
import stat
from collections.abc import Iterator, Sequence
from io import BufferedIOBase, BufferedReader, FileIO
from pathlib import Path, PurePath
from typing import Final

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.storage.etags import Etag, check_regular
from dataserver.dataset.storage.interface import Entry, EntryKind, StoredFile

_BUFFER_BYTES: Final = 1 << 20
"""Bytes of a read; large, since shards are read once, from the first byte to the last."""


class Descriptor:
    """A file descriptor that is closed when nobody uses it any more, so that a cache can drop it at any time."""

    def __init__(self, path: PurePath) -> None:
        check_regular(path)
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read pieces, each given by offset and length; fewer bytes where the file ends."""
        return [os.pread(self.number, length, offset) for offset, length in ranges]

    def etag(self) -> Etag:
        """Return the state of the open file, whatever has its name by now."""
        return Etag.of(os.fstat(self.number))


class LocalStorage:
    """Files by their paths. Folders behind links are not searched, and no file may lie outside of the dataset."""

    is_local = True
    holds_indexes = True

    def is_file(self, path: PurePath) -> bool:
        """Return whether a path names one file rather than a folder."""
        Path(path).stat()
        return Path(path).is_file()

    def walk(self, root: PurePath) -> Iterator[Entry]:
        """Yield all names below a folder but hidden ones."""
        folders = [""]
        while folders:
            folder = folders.pop()
            with os.scandir(Path(root) / folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    name = folder + entry.name
                    if not entry.is_dir():
                        plain = entry.is_file(follow_symlinks=False)
                        yield Entry(name, EntryKind.FILE if plain else EntryKind.LINK)
                    elif entry.is_symlink():
                        yield Entry(name, EntryKind.FOLDER_LINK)
                    else:
                        folders.append(f"{name}/")

    def check(self, root: PurePath, name: str) -> None:
        """Raise DatasetError if a link leaves the dataset."""
        if _has_no_link(root, name):
            return
        path = Path(root) / name
        real = Path(os.path.realpath(path))  # `resolve` raises RuntimeError where a link leads to itself
        if not real.is_relative_to(os.path.realpath(root)):
            raise DatasetError(
                f"{path} is a link that leaves the dataset folder {root}; copy the file into it or name its own folder"
            )

    def etag(self, path: str) -> Etag:
        """Return the state of a file."""
        return Etag.of(os.stat(path))  # noqa: PTH116  text: a server asks for very many, and `Path` takes longer

    def open(self, path: PurePath, holds_blocks: bool = False) -> BufferedIOBase:  # noqa: ARG002 - the system does
        """Open a regular file for reading from its start."""
        check_regular(path)
        return BufferedReader(FileIO(path), _BUFFER_BYTES)

    def ranges(self, path: PurePath) -> Descriptor:
        """Open a regular file for reading by ranges."""
        return Descriptor(path)

    def read_ahead(self, wanted: Sequence[tuple[StoredFile, Sequence[tuple[int, int]]]]) -> None:
        """Nothing: a local read takes no longer than to ask for it."""


def _has_no_link(root: PurePath, name: str) -> bool:
    """Whether a file lies below a folder for certain: each part of its name is there, and none is a link.

    It takes a tenth of the time of `realpath`, which looks at the folders above as well.
    """
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        return False
    path = str(root)
    try:
        for part in parts:
            path = f"{path}/{part}"
            if stat.S_ISLNK(os.lstat(path).st_mode):  # text: asked for each image
                return False
    except OSError:
        return False
    return True
