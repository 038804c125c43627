"""The headers of all indexes of a dataset in one file beside them, so that a server opens it at once.

An entry counts while its index has the size that it had then and did not change since the summary was written, by the
file system's own time. Any other index is read itself. Columns are only ever read
from an index whose own header is the one that was expected, so that a summary which lies serves nothing wrong.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dataserver.dataset.errors import DatasetError, printable
from dataserver.dataset.index.arrays import Array, ArraysError, read_arrays, write_arrays
from dataserver.dataset.index.format import FORMAT_VERSION, IndexHeader
from dataserver.dataset.index.known import State
from dataserver.dataset.index.rules import read_rules
from dataserver.dataset.shards.listing import Listing

SUMMARY_NAME: Final = "disttrain.summary"
_VERSION: Final = 3
_NUMBERS: Final = ("index_bytes", "shard_bytes", "sidecar_bytes", "num_samples", "columns", "rules", "has_images")
_DIGESTS: Final = ("sha256", "sidecar_sha256", "columns_digest")
_UNKNOWN: Final[State] = (0, 0, 0, 0)
"""Stands for a state; no file changed in 1970."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IndexContent:
    """What an index says without a column being read."""

    header: IndexHeader
    columns: Mapping[str, str]
    """Sidecar columns: name -> Arrow type. Shards with the same ones may share the mapping."""
    num_bytes: int
    """Size of the index file."""
    known: State | None
    """State in which its shard and sidecar were seen to have the contents that it describes; None where that is not
    known."""


class Summary:
    """What a summary says of each shard, by name."""

    def __init__(self, entries: Mapping[str, IndexContent], written_ns: int) -> None:
        self._entries = entries
        self._written_ns = written_ns
        """When the file system last changed the summary."""

    @classmethod
    def read(cls, folder: Path) -> "Summary":
        """The summary of the indexes below a folder; an empty one if there is none, or it cannot be used."""
        path = folder / SUMMARY_NAME
        try:
            written_ns = path.stat().st_ctime_ns  # before it is read: one that is replaced meanwhile counts as older
            about, arrays = read_arrays(path)
            return cls(_parse(about, arrays), written_ns)
        except (FileNotFoundError, NotADirectoryError):
            return cls({}, 0)
        except (ArraysError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            _log.warning(
                "%s cannot be used (%s); each index is read instead, dataserver index makes it again",
                path,
                printable(str(error)),
            )
            return cls({}, 0)

    def find(self, name: str, index: os.stat_result) -> IndexContent | None:
        """What a shard's index says, if it is the one that was there when the summary was written."""
        entry = self._entries.get(name)
        fresh = index.st_ctime_ns < self._written_ns  # equal times prove nothing
        return entry if entry is not None and fresh and entry.num_bytes == index.st_size else None

    def warn_of_gone(self, listing: Listing) -> None:
        """Log which shards of a folder were there when it was indexed and are not now, if any."""
        if not listing.is_folder or listing.shards[0].dataset is not None:
            return
        unread = {name for name, _ in listing.unread}
        gone = sorted(self._entries.keys() - {shard.name for shard in listing.shards} - unread)
        if gone:
            _log.warning(
                "%s lacks shards that were indexed: %d, the first is %a; their samples are not served. Copy them again,"
                " or run dataserver index once without them",
                *(listing.shards[0].root, len(gone), gone[0]),
            )

    def holds(self, contents: Sequence[tuple[str, IndexContent]]) -> bool:
        """Whether these, by name, are its entries: none more, none less, each taken from here by `find`."""
        return len(contents) == len(self._entries) and all(self._entries.get(n) is found for n, found in contents)


def write_summary(folder: Path, shards: Sequence[tuple[str, IndexContent]]) -> None:
    """Write the summary of shards, by name, into the folder of their indexes; a warning where that is impossible."""
    schemas: dict[tuple[tuple[str, str], ...], int] = {}
    rules: dict[str, int] = {}
    numbers, digests, known = [], [], []
    for _, found in shards:
        header = found.header
        columns = schemas.setdefault(tuple(found.columns.items()), len(schemas))
        made_by = rules.setdefault(header.rules, len(rules))
        sizes = found.num_bytes, header.shard_bytes, header.sidecar_bytes, header.num_samples
        numbers.append((*sizes, columns, made_by, header.has_images))
        digests.append(bytes.fromhex(header.sha256 + (header.sidecar_sha256 or "00" * 32) + header.columns_digest))
        known.append(found.known or _UNKNOWN)
    about = {
        "version": _VERSION,
        "format_version": FORMAT_VERSION,
        "names": [name for name, _ in shards],
        "columns": [dict(schema) for schema in schemas],
        "rules": list(rules),
    }
    arrays: dict[str, Array] = {
        "numbers": np.array(numbers, np.int64).reshape(-1, len(_NUMBERS)),
        "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, len(_DIGESTS), 32),
        "known": np.array(known, np.int64).reshape(-1, len(_UNKNOWN)),
    }
    try:
        write_arrays(folder / SUMMARY_NAME, about, arrays)
    except DatasetError as error:
        _log.warning("%s; servers start more slowly without it", error)


def _parse(about: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, IndexContent]:
    if (about["version"], about["format_version"]) != (_VERSION, FORMAT_VERSION):
        raise ValueError("it was written by another release")
    names, columns = list(map(str, about["names"])), [{str(k): str(v) for k, v in c.items()} for c in about["columns"]]
    rules = list(map(str, about["rules"]))
    for written in rules:
        read_rules(written)
    numbers, digests, states = arrays["numbers"], arrays["digests"], arrays["known"]
    if numbers.shape != (len(names), len(_NUMBERS)) or digests.shape != (len(names), len(_DIGESTS), 32):
        raise ValueError("its parts do not fit each other")
    if states.shape != (len(names), len(_UNKNOWN)):
        raise ValueError("its states do not fit its shards")
    found = {}
    text = digests.tobytes().hex()
    for i, (name, row, state) in enumerate(zip(names, numbers.tolist(), map(tuple, states.tolist()), strict=True)):
        at = i * 64 * len(_DIGESTS)
        size, shard_bytes, sidecar_bytes, num_samples, schema, made_by, has_images = row
        if min(num_samples, schema, made_by) < 0:
            raise ValueError(f"it gives {name!a} a negative number")
        header = IndexHeader(
            FORMAT_VERSION,
            shard_bytes,
            sidecar_bytes,
            text[at : at + 64],
            text[at + 64 : at + 128] if sidecar_bytes >= 0 else "",
            text[at + 128 : at + 192],
            num_samples,
            rules[made_by],
            bool(has_images),
        )
        found[name] = IndexContent(header, columns[schema], size, None if state == _UNKNOWN else state)
    return found
