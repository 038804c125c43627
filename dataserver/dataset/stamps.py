"""Stamps: how this machine tells one state of a file from another without reading it."""

import hashlib
import os
from pathlib import Path
from typing import Final, NamedTuple

TICK_S: Final = 0.02
"""Longer than a kernel takes from one time that it gives to files to the next, 10 ms at most."""


class Stamp(NamedTuple):
    """One state of a file as this machine sees it. Another may see another inode: `known.py` stores times alone."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    """When the file system last changed the file or what it says of it; no program sets it."""

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """The stamp that the operating system's answer holds."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
