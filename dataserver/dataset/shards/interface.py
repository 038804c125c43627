"""What a shard format offers: the members of a shard, with where their bytes lie, in one pass that hashes it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.external import ExternalFiles
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.members import Member, Split
from dataserver.dataset.shards.modalities import ONLY_IMAGES, Media
from dataserver.dataset.shards.pages import Page


@dataclass(frozen=True, slots=True)
class ShardSource:
    """One shard that is read."""

    path: Path
    reader: HashingReader
    """Reads the shard from its first byte on. Whatever the format leaves is read and hashed afterwards."""
    split: Split
    """The split, for formats whose members have names and no keys."""
    pages: list[Page] = field(default_factory=list)
    """Where the format notes compressed pages that members lie in: their offsets are addresses of `PageTable`."""
    external: ExternalFiles | None = None
    """Where a format whose images lie in other files reads and notes them."""
    media: Media = ONLY_IMAGES
    """What is a part of samples."""
    are_chats: bool = False
    """Whether samples are conversations, whose turns stay as they are."""
    lists: frozenset[str] = frozenset()
    """Columns that are lists of texts and hold captions, for formats whose documents have no other lists."""
    refused: str = ""
    """Why no sample is used, where a scan before ended with `RefusedShardError`; becomes a finding."""


class ShardFormat(Protocol):
    """A format of shards. What it yields becomes samples in the same way for all (`samples.py`)."""

    suffix: str
    """What names of shards end in."""
    sidecar_suffix: str
    """What stands for `suffix` in the name of the file with a shard's columns; empty where there is none."""
    has_external: bool
    """Whether images lie in other files than the shard."""
    is_sought: bool
    """Whether files of this suffix are shards wherever they lie in a dataset; else they must be named one by one."""
    reads_parts: bool
    """Whether `scan` reads parts of the shard by itself, beside the reader that it is given."""

    def scan(self, source: ShardSource, findings: Findings) -> Iterator[Member]:
        """Yield the members in order, those of a sample together; what cannot be used is counted in `findings`.

        Raises:
            TarError: the rest cannot be read; the members before it were yielded.
            RefusedShardError: the rest cannot be read, and the members before it are not to be used.
        """
