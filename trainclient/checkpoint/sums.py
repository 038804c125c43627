"""Checksums of a checkpoint's files: taken while they are written, compared before they are read."""

import heapq
import io
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from crc32c import crc32c as crc32c_of
from torch.distributed.checkpoint.filesystem import FileSystem

from trainclient.checkpoint.state import STATE_FILE, FileSum, Manifest

CHUNK_BYTES: Final = 8 << 20
"""How much is summed, or read, at once."""


class SummingFiles(FileSystem):
    """Files as torch's writer of checkpoints makes them: one after the other, from the first byte to the last."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        """Sums of the files that are complete, by their names."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; what is written to it is summed."""
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            summed = _Summed(stream)
            yield cast(io.IOBase, summed)
            self.sums[Path(path).name] = summed.found

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and its sum."""
        super().rename(path, new_path)
        if (found := self.sums.pop(Path(path).name, None)) is not None:
            self.sums[Path(new_path).name] = found


class _Summed:
    """A file that is written from its first byte to its last."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._bytes = self._crc = 0

    @property
    def found(self) -> FileSum:
        return FileSum(self._bytes, f"{self._crc:08x}")

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._crc = crc32c_of(view, self._crc)
        self._bytes += len(view)
        return len(view)

    def fileno(self) -> int:
        """Descriptor that torch syncs; it flushes nothing before, and the end of the file would not be on storage."""
        self._stream.flush()
        return int(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        if name in ("seek", "truncate", "writelines"):  # the sum is that of bytes in their order
            raise AttributeError(name)
        return getattr(self._stream, name)


def sum_of(path: Path) -> FileSum:
    """What a file holds; OSError if it cannot be read."""
    crc = size = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = crc32c_of(chunk, crc)
            size += len(chunk)
    return FileSum(size, f"{crc:08x}")


def misfits(path: Path, files: Mapping[str, FileSum]) -> list[str]:
    """What can be seen of these files of a checkpoint without reading them: which are missing or of another size."""
    return [problem for name, expected in sorted(files.items()) if (problem := _misfit(path / name, expected))]


def damages(path: Path, files: Mapping[str, FileSum]) -> list[str]:
    """What is wrong with these files of a checkpoint; reads each of the right size to its end."""
    return [problem for name, expected in sorted(files.items()) if (problem := _damage(path / name, expected))]


def _misfit(file: Path, expected: FileSum) -> str:
    try:
        found = file.stat()
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):  # to open a pipe may wait for ever
        return f"{file.name} is no regular file"
    if found.st_size != expected.bytes:
        return f"{file.name} has {found.st_size} bytes, and {expected.bytes} were written"
    return ""


def _damage(file: Path, expected: FileSum) -> str:
    if problem := _misfit(file, expected):
        return problem
    try:
        found = sum_of(file)
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    if found != expected:
        return f"{file.name} is damaged: it has CRC-32C {found.crc32c}, and was written with {expected.crc32c}"
    return ""


def seen_damage(path: Path, manifest: Manifest) -> list[str]:
    """What can be found without reading tensors: sizes, and the sum of torch's list of tensors, which it unpickles."""
    files = manifest.files or {}
    return misfits(path, files) or damages(path, {name: found for name, found in files.items() if name == ".metadata"})


def extras(path: Path, manifest: Manifest) -> list[str]:
    """Files in a checkpoint that it was not written with."""
    if manifest.files is None:
        return []
    return sorted({p.name for p in path.iterdir()} - manifest.files.keys() - {STATE_FILE, f".{STATE_FILE}"})


def dealt(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """Which process takes what, by its bytes, so that all take about the same; the largest first."""
    found: dict[str, int] = {}
    loads = [(0, process) for process in range(processes)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, found[name] = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], found[name]))
    return found
