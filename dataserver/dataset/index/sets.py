"""The sets of shards that a dataset had each time it was indexed, by their fingerprints.

A dataset that grew still has the old set: the shards that it had then, as long as they are indexed as they were. A
line of JSON in the folder of the indexes lists, in order, each fingerprint and the shards that were new in it. Nobody
has to trust it: a fingerprint is that of its shards, or it is not served.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from dataserver.dataset.errors import DatasetError, canonical, check_storage, printable
from dataserver.dataset.index.format import IndexHeader
from dataserver.dataset.index.notes import read_note, write_note

SETS_NAME: Final = "disttrain.sets"
MAX_SETS: Final = 64
"""The newest ones are kept."""
_VERSION: Final = 1

_log = logging.getLogger(__name__)


class ShardSet(NamedTuple):
    """Some of a dataset's shards."""

    fingerprint: str
    names: frozenset[str]


def fingerprint_of(shards: Iterable[tuple[str, IndexHeader]]) -> str:
    """Return sha256, hex, of the names, bytes and index columns of shards, in name order."""
    digest = hashlib.sha256(b"disttrain dataset\n")
    for name, header in shards:
        digest.update(canonical([name, header.sha256, header.columns_digest]))
    return digest.hexdigest()


def earlier_sets(folder: Path, shards: Sequence[tuple[str, IndexHeader]]) -> list[ShardSet]:
    """Return the sets that a dataset grew from and still has, oldest first.

    Args:
        folder: of the indexes.
        shards: all of them as they are indexed now, in name order.
    """
    current, headers = fingerprint_of(shards), dict(shards)
    found: list[ShardSet] = []
    for one in _read_sets(folder):
        if one.fingerprint == current or not _is_there(one, shards, headers):
            break  # nor is any later one there, since it holds this one
        found.append(one)
    return found


def find_set(folder: Path, shards: Sequence[tuple[str, IndexHeader]], fingerprint: str) -> ShardSet | None:
    """Return the set with a fingerprint; None where the dataset never had it, or its shards are others now."""
    headers = dict(shards)
    return next(
        (one for one in _read_sets(folder) if one.fingerprint == fingerprint and _is_there(one, shards, headers)), None
    )


def add_set(folder: Path, shards: Sequence[tuple[str, IndexHeader]]) -> None:
    """Note the shards that a dataset has now; a warning where that is impossible."""
    earlier = earlier_sets(folder, shards)
    names = frozenset(name for name, _ in shards)
    sets = [*earlier, ShardSet(fingerprint_of(shards), names)][-MAX_SETS:]
    before: frozenset[str] = frozenset()
    entries = []
    for one in sets:
        entries.append({"fingerprint": one.fingerprint, "added": sorted(one.names - before)})
        before = one.names
    content = canonical({"version": _VERSION, "sets": entries})
    path = folder / SETS_NAME
    try:
        if not path.is_file() or path.read_bytes() != content:
            write_note(path, content)
    except (DatasetError, OSError) as error:
        _log.warning("%s; when shards are added, jobs of this set cannot go on", error)


def _is_there(one: ShardSet, shards: Sequence[tuple[str, IndexHeader]], headers: Mapping[str, IndexHeader]) -> bool:
    if not one.names <= headers.keys():
        return False
    return fingerprint_of((name, header) for name, header in shards if name in one.names) == one.fingerprint


def _read_sets(folder: Path) -> list[ShardSet]:
    path = folder / SETS_NAME
    try:
        content = read_note(path)
        if content["version"] != _VERSION:
            raise ValueError("it was written by another release")
        sets: list[ShardSet] = []
        names: frozenset[str] = frozenset()
        for entry in content["sets"]:
            names |= frozenset(map(str, entry["added"]))
            sets.append(ShardSet(str(entry["fingerprint"]), names))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        check_storage(path, error)
        _log.warning("%s cannot be used (%s): jobs of earlier sets of shards are refused", path, printable(str(error)))
        return []
    return sets
