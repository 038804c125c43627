"""Plain tars of a given size, written whole or not at all, and read again before they count."""

import re
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from crc32c import crc32c as crc32c_of

from dataserver.dataset.errors import DatasetError, Findings
from dataserver.dataset.index.format import atomic_writer
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.tar import scan_members

Members = Sequence[tuple[str, bytes]]
"""Names and contents of the members of a sample."""
_MODE: Final = 0o644


class TarWriter:
    """Writes samples into `STEM-00000.tar` and so on; the same samples give the same bytes."""

    def __init__(self, folder: Path, stem: str, shard_bytes: int) -> None:
        """Write into a folder.

        Args:
            folder: where the tars go.
            stem: what their names begin with; may have folders.
            shard_bytes: a tar is closed by the sample with which it reaches so many.
        """
        self._folder = folder
        self._stem = stem
        self._shard_bytes = shard_bytes
        self._open = ExitStack()
        self._tar: BinaryIO | None = None
        self._temp = Path()
        self._sums: list[tuple[str, int]] = []
        self.written: list[str] = []
        """Names of the tars, relative to the folder."""

    def add(self, sample: Members) -> None:
        """Write the members of one sample. Raises DatasetError where that is impossible."""
        if self._tar is None:
            name = _name(self._stem, len(self.written))
            self._temp = self._open.enter_context(atomic_writer(self._folder / name))
            self._tar = self._temp.open("wb", buffering=1 << 20)
            self.written.append(name)
        for name, content in sample:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), _MODE
            self._tar.write(info.tobuf(tarfile.PAX_FORMAT))
            self._tar.write(content)
            self._tar.write(bytes(-len(content) % tarfile.BLOCKSIZE))
            self._sums.append((name, crc32c_of(content)))
        if self._tar.tell() >= self._shard_bytes:
            self.close()

    def close(self) -> None:
        """End the last tar, compare it with what was to be written, and publish it."""
        if self._tar is None:
            return
        end = self._tar.tell() + 2 * tarfile.BLOCKSIZE
        self._tar.write(bytes(2 * tarfile.BLOCKSIZE + -end % tarfile.RECORDSIZE))
        self._tar.close()
        self._tar = None
        sums, self._sums = self._sums, []
        with self._open:
            if _sums(self._temp) != sums:
                raise DatasetError(f"{self._temp} does not hold what was written to it; check the disk")

    def remove_rest(self) -> None:
        """Remove the tars that an earlier run left behind the last one of this run."""
        written = {self._folder / name for name in self.written}
        for path in self._found():
            if path not in written:
                path.unlink(missing_ok=True)

    def _found(self) -> list[Path]:
        """The tars of this stem that are there, whatever numbers are missing between them."""
        stem = self._folder / self._stem
        if not stem.parent.is_dir():
            return []
        number = re.compile(rf"{re.escape(stem.name)}-\d{{5,}}\.tar")
        return [path for path in stem.parent.iterdir() if number.fullmatch(path.name)]

    def abandon(self, error: BaseException) -> None:
        """Close the tar that is open, and remove all tars of this name."""
        if self._tar is not None:
            self._tar.close()
            self._open.__exit__(type(error), error, error.__traceback__)
        for path in self._found():  # also those of an earlier run, which nobody knows to be of these samples
            path.unlink(missing_ok=True)


def _name(stem: str, number: int) -> str:
    return f"{stem}-{number:05d}.tar"


def _sums(path: Path) -> list[tuple[str, int]]:
    """Name and checksum of each member of a tar."""
    with path.open("rb") as file:
        reader = HashingReader(file, path.stat().st_size, sha256="")
        return [(m.name, crc32c_of(m.content or b"")) for m in scan_members(reader, Findings())]
