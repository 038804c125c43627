"""Named captions: where the index finds further texts of a sample, beside its own."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from dataserver.dataset.errors import DatasetError

OWN: Final = "own"
"""What jobs call the text that a sample has without a named caption."""
PARQUET: Final = "parquet"
"""Stands for the sidecar where a caption is one of its columns."""
MOST_CAPTIONS: Final = 16
COLUMN_PREFIX: Final = "caption."
"""Before the names of captions where they are columns of an index."""
JSON: Final = "json"
"""The member that has the columns of a Parquet shard, in each row, as its entries."""
MAX_CAPTION_BYTES: Final = 1 << 29
"""Limit of all named captions in the members of one shard."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ELEMENT: Final = re.compile(r"(.+)\[(\d{1,4})\]", re.DOTALL)
"""An element of a list, counted from 0."""
_FORM: Final = "NAME=MEMBER, NAME=MEMBER:KEY of a JSON member, or NAME=parquet:COLUMN"


class CaptionSource(NamedTuple):
    """Where one named caption lies."""

    name: str
    part: str
    """Extension of a member, or `PARQUET`."""
    field: str
    """Entry of a JSON member, or column; empty where a member is the text. `captions[0]` is the first text of a list,
    unless there is an entry of that very name."""

    @property
    def column(self) -> str:
        """The column of an index that holds it."""
        return COLUMN_PREFIX + self.name

    def __str__(self) -> str:
        return f"{self.part}:{self.field}" if self.field else self.part


def parse_captions(entries: Sequence[str]) -> tuple[CaptionSource, ...]:
    """Return what the entries of --caption say, in name order.

    Raises:
        DatasetError: an entry does not name a caption and its source, or a name stands twice.
    """
    found: dict[str, CaptionSource] = {}
    for entry in entries:
        name, equals, source = entry.partition("=")
        part, _, field = source.partition(":")
        part = part.removeprefix(".").lower()
        if not (equals and part) or "/" in part or (part in (PARQUET, JSON) and not field):
            raise DatasetError(f"--caption {entry}: {_FORM} is required")
        if not _NAME.fullmatch(name) or name == OWN:
            need = f"1 to 64 ASCII letters, digits, '.', '_' and '-', the first a letter or digit, and not {OWN!r}"
            raise DatasetError(f"--caption {entry}: a caption is called {name[:80]!a}; {need} are required")
        if name in found:
            raise DatasetError(f"--caption names {name!r} twice; give each caption a name of its own")
        found[name] = CaptionSource(name, part, field)
    if len(found) > MOST_CAPTIONS:
        raise DatasetError(f"--caption is given {len(found)} times, the limit is {MOST_CAPTIONS}")
    return tuple(found[name] for name in sorted(found))


def captions_in_members(sources: Sequence[CaptionSource], has_columns: bool) -> tuple[CaptionSource, ...]:
    """Return the captions that the members of samples may hold.

    Args:
        sources: of all captions.
        has_columns: whether the shard has its columns in itself, as Parquet does, and not in a sidecar.
    """
    found = (s._replace(part=JSON) if has_columns and s.part == PARQUET else s for s in sources)
    return tuple(source for source in found if source.part != PARQUET)


def entry_of(document: Mapping[str, Any], field: str) -> object:
    """Return what a JSON object has as an entry, or as an element of a list; None where it has nothing there."""
    if field in document or (found := _ELEMENT.fullmatch(field)) is None:
        return document.get(field)
    held, number = document.get(found[1]), int(found[2])
    return held[number] if isinstance(held, list) and number < len(held) else None


def caption_lists(sources: Sequence[CaptionSource]) -> frozenset[str]:
    """Return the entries of KEY.json that captions take elements of."""
    found = (_ELEMENT.fullmatch(source.field) for source in sources if source.part == JSON)
    return frozenset(match[1] for match in found if match is not None)
