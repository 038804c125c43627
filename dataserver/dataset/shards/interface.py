"""What a shard format offers: the members of a shard, with where their bytes lie, in one pass that hashes it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.pages import Page

MAX_MEMBER_BYTES: Final = 64 << 20
"""A larger member is skipped unread (but hashed)."""


class Member(NamedTuple):
    """One member of a shard; `content` is None where `length` exceeds `MAX_MEMBER_BYTES`, and where it is special."""

    name: str
    offset: int
    length: int
    content: bytes | None
    special: bool = False
    """Whether it is no regular file: its sample does without it, or is left out."""
    key: str | None = None
    """Of the sample, where the format has keys; `name` is what follows it then. Else it is a part of the name."""
    parsed: Any = None
    """What the member says, where the format reads that itself: an ImagePart, a dictionary, or a SampleError."""


Split = Callable[[str], tuple[str, str] | None]
"""Splits a member name into key and extension; None where there is no key."""


@dataclass(frozen=True, slots=True)
class ShardSource:
    """One shard that is read."""

    path: Path
    reader: HashingReader
    """At its first byte. Whatever the format leaves is read and hashed afterwards."""
    split: Split
    """For formats whose members have names and no keys."""
    pages: list[Page] = field(default_factory=list)
    """Where the format notes compressed pages that members lie in: their offsets are addresses of `PageTable`."""


class ShardFormat(Protocol):
    """A format of shards. What it yields becomes samples in the same way for all (`samples.py`)."""

    suffix: str
    """What names of shards end in."""
    sidecar_suffix: str
    """What stands for `suffix` in the name of the file with a shard's columns; empty where there is none."""

    def scan(self, source: ShardSource, findings: Findings) -> Iterator[Member]:
        """Yield the members in order, those of a sample together; what cannot be used is counted in `findings`.

        Raises:
            TarError: the rest cannot be read; the members before it were yielded.
        """
