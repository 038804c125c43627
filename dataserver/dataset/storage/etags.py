"""Etags: how this machine tells one state of a file from another without reading it."""

import os
import stat
from pathlib import PurePath
from typing import Final, NamedTuple

TICK_S: Final = 0.02
"""Longer than a kernel takes from one time that it gives to files to the next, 10 ms at most."""
NOT_REGULAR: Final = -2
"""Stands for the size of what is no regular file; `index.format.NO_SIDECAR` is another one."""


class Etag(NamedTuple):
    """One state of a file as this machine sees it. Another may see another inode: `known.py` stores times alone.

    A backend without inodes and times makes them of what it has, such as a digest and the time of the last upload.
    """

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    """When the file system last changed the file or what it says of it; no program sets it."""

    @classmethod
    def of(cls, found: os.stat_result) -> "Etag":
        """The etag that the operating system's answer holds.

        All that are no regular files have the same one, which is older than any index: they have no content that could
        be compared, and a folder's size and times change with what lies in it.
        """
        if not stat.S_ISREG(found.st_mode):
            return cls(0, 0, NOT_REGULAR, 0, 0)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def check_regular(path: PurePath) -> None:
    """Raise OSError unless a file is a regular one: to open a FIFO would wait for ever for somebody to write to it.

    The error has no `errno` then: the storage is well, and what lies there is not what belongs there.
    """
    mode = os.stat(path).st_mode  # noqa: PTH116  text or path: servers ask for very many
    if not stat.S_ISREG(mode):
        raise OSError(f"it is a {_kind(mode)}, no regular file")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")
