"""A folder of loose files as one file: a line of JSON, [name, bytes], for each of them in the order of their names.

The line of a link, or of what is no regular file, says -1 bytes. Hidden files and other files than images, clips,
videos and what stands beside them have no line.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path, PurePath
from typing import Final

from dataserver.audio import AUDIO_SUFFIXES
from dataserver.dataset.errors import DatasetError
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.interface import Entry, StoredFile
from dataserver.images import IMAGE_SUFFIXES
from dataserver.video import VIDEO_SUFFIXES

LISTING_NAME: Final = "folder.images"
"""What the file is called that stands for the folder that it would lie in."""
MAX_FILES: Final = 1 << 21
"""Files that one folder may hold."""
_MEDIA_SUFFIXES: Final = IMAGE_SUFFIXES | AUDIO_SUFFIXES | VIDEO_SUFFIXES
_MEMBER_SUFFIXES: Final = _MEDIA_SUFFIXES | {"txt", "json"}


def is_media(name: str) -> bool:
    """Whether a file claims to be an image, a clip or a video, by its name."""
    return name.rpartition(".")[2].lower() in _MEDIA_SUFFIXES


def is_member(name: str) -> bool:
    """Whether a file may be a part of a sample, by its name without folders."""
    return name.rpartition(".")[2].lower() in _MEMBER_SUFFIXES and not name.startswith(".")


class _Listing:
    """The files of one folder as they are now; it can be read by ranges."""

    def __init__(self, path: PurePath) -> None:
        """List the folder of a path. Raises OSError, or DatasetError where it has too many files."""
        found: list[tuple[str, int, int, int]] = []
        with os.scandir(Path(path).parent) as entries:
            for entry in entries:
                if not is_member(entry.name) or entry.is_dir():
                    continue
                stat = entry.stat(follow_symlinks=False)
                size = stat.st_size if entry.is_file(follow_symlinks=False) else -1
                found.append((entry.name, size, stat.st_mtime_ns, stat.st_ctime_ns))
                if len(found) > MAX_FILES:
                    raise DatasetError(f"more than {MAX_FILES} files in {path.parent}; split it, or make tars of them")
        found.sort()
        self.data = b"".join(f"{json.dumps([name, size])}\n".encode() for name, size, _, _ in found)
        self._times = hashlib.sha256(json.dumps([mtime for _, _, mtime, _ in found]).encode()).digest()
        self._changed_ns = max((ctime for _, _, _, ctime in found), default=0)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read pieces, each given by offset and length."""
        return [self.data[offset : offset + length] for offset, length in ranges]

    def etag(self) -> Etag:
        """The state of all files: a digest stands for the time of their contents."""
        return Etag(0, 0, len(self.data), int.from_bytes(self._times[:7], "big"), self._changed_ns)


class FolderListings:
    """Listings of local folders, by paths that end in `LISTING_NAME`."""

    is_local = True
    holds_indexes = True

    def is_file(self, path: PurePath) -> bool:
        """Return whether there is such a folder."""
        return Path(path).parent.is_dir()

    def walk(self, root: PurePath) -> Iterator[Entry]:
        """There is nothing below a listing."""
        del root
        return iter(())

    def check(self, root: PurePath, name: str) -> None:
        """A listing is made here, and leads nowhere."""

    def etag(self, path: str) -> Etag:
        """Return the state of a listing."""
        return _Listing(PurePath(path)).etag()

    def open(self, path: PurePath, holds_blocks: bool = False) -> BufferedIOBase:  # noqa: ARG002 - it is in memory
        """Open the listing of a folder."""
        return io.BytesIO(_Listing(path).data)

    def ranges(self, path: PurePath) -> _Listing:
        """Open a listing for reading by ranges."""
        return _Listing(path)

    def read_ahead(self, wanted: Sequence[tuple[StoredFile, Sequence[tuple[int, int]]]]) -> None:
        """Nothing: a listing is in memory."""
