"""Shards with the same bytes, whose samples would be served once for each copy.

Of a manifest or a folder the bytes are those of its images, too: equal lists name other files in other folders.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.index.format import IndexHeader
from dataserver.dataset.index.notes import write_note
from dataserver.dataset.shards.formats import format_of

ALLOWED_NAME: Final = "disttrain.duplicates-allowed"
"""Name of a file in the folder of the indexes, by which the user allows copies of shards."""
_MOST_SHOWN: Final = 8


def copies(shards: Iterable[tuple[str, IndexHeader]]) -> list[list[str]]:
    """Return the names of shards with the same bytes, a list for each content that several have."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, header in shards:
        if header.num_samples:
            found = format_of(name)
            of_images = header.columns_digest if found is not None and found.has_external else ""
            names.setdefault((header.sha256, of_images), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def check_copies(path: Path, shards: Sequence[tuple[str, IndexHeader]], allowed: bool, command: str) -> None:
    """Raise DatasetError, which names the copies, if shards have the same bytes and that is not allowed.

    Args:
        path: of the dataset.
        shards: all of them, by name.
        allowed: whether copies are wanted.
        command: which indexes the dataset.
    """
    found = [] if allowed else copies(shards)
    if not found:
        return
    shown = "; ".join(" = ".join(map(ascii, same[:_MOST_SHOWN])) for same in found[:_MOST_SHOWN])
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    num_shards = sum(map(len, found))
    raise DatasetError(
        f"{num_shards} shards at {path} are copies of {len(found)}: {shown}{more}; each sample would be served once for"
        f" each copy: {_remedy(path, found[0])}, or run: {command} --allow-duplicates"
    )


def allow_copies(folder: Path) -> None:
    """Note in the folder of the indexes that copies are wanted. Raises DatasetError where it cannot be written."""
    write_note(folder / ALLOWED_NAME, b"shards with the same bytes are served several times\n")


def are_copies_allowed(folder: Path) -> bool:
    """Whether the dataset may have shards with the same bytes."""
    return (folder / ALLOWED_NAME).is_file()


def _remedy(path: Path, same: Sequence[str]) -> str:
    """What helps: the Hub's cache has one snapshot for each revision, whose files are links to the same blobs."""
    for name in same:
        before, found, after = f"/{name}".rpartition("/snapshots/")
        if found and "/" in after:
            snapshot = path / f"{before}/snapshots/{after.partition('/')[0]}".lstrip("/")
            return f"copy one snapshot of this cache, cp -rL {snapshot} FOLDER, and index FOLDER"
    return "move the copies out of the folder"
