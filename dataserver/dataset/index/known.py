"""The state of a shard and its sidecar for which their contents were seen to be those that an index describes.

One line of JSON beside the index. While the file system gives both files the times that are noted there, nobody needs
to read them again. It names the contents, so it holds whatever index it lies beside, and wherever it was copied to:
there both files have other times, and nothing is known of them. Anybody may delete it.
"""

import json
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.index.format import IndexHeader
from dataserver.dataset.index.notes import read_note, write_note
from dataserver.dataset.storage.etags import Etag

KNOWN_SUFFIX: Final = ".known"
_VERSION: Final = 1
_MAX_BYTES: Final = 1024

State = tuple[int, int, int, int]
"""mtime and ctime of a shard and of its sidecar, nanoseconds; zeros where there is no sidecar.

Sizes are in the header. Devices and inodes are left out: machines that mount the same files see others.
"""


def known_path(index: Path) -> Path:
    """The file beside an index."""
    return index.with_suffix(KNOWN_SUFFIX)


def state_of(etags: tuple[Etag, Etag | None]) -> State:
    """The state that the etags of a shard and its sidecar show."""
    shard, sidecar = etags
    return (shard.mtime_ns, shard.ctime_ns, *((0, 0) if sidecar is None else (sidecar.mtime_ns, sidecar.ctime_ns)))


def read_known(index: Path, header: IndexHeader) -> State | None:
    """The state in which the contents were those of an index; None where that is not known."""
    try:
        found = read_note(known_path(index), _MAX_BYTES)
        if (found["known"], found["sha256"], found["sidecar_sha256"]) != _content(header):
            return None
        shard, shard_changed, sidecar, sidecar_changed = map(int, found["times_ns"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return shard, shard_changed, sidecar, sidecar_changed


def write_known(index: Path, header: IndexHeader, state: State) -> str:
    """Note that the contents of an index were found in this state; why not, where that is impossible."""
    version, sha256, sidecar_sha256 = _content(header)
    found = {"known": version, "sha256": sha256, "sidecar_sha256": sidecar_sha256, "times_ns": state}
    try:
        write_note(known_path(index), f"{json.dumps(found)}\n".encode("ascii"))
    except DatasetError as error:
        return str(error)
    return ""


def _content(header: IndexHeader) -> tuple[int, str, str]:
    return _VERSION, header.sha256, header.sidecar_sha256
