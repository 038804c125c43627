"""What a shard format offers: the members of a shard, with where their bytes lie, in one pass that hashes it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from dataserver.dataset.errors import Findings
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.modalities import IMAGES, ONLY_IMAGES, Media, StoredModality
from dataserver.dataset.shards.pages import Page
from dataserver.dataset.shards.parts import ExternalPart, ImagePart

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
    """Key of the sample, where the format has keys; `name` is what follows it. Else it is a part of the name."""
    parsed: Any = None
    """What the member says, where the format reads that itself: an ImagePart, a dictionary, or a SampleError."""
    modality: int = 0
    """Number of the modality that it must be of, whatever its name and content say; 0 where these decide."""


Split = Callable[[str], tuple[str, str] | None]
"""Splits a member name into key and extension; None where there is no key."""


class ImageFiles(Protocol):
    """Reads images that lie in other files, and notes where."""

    @property
    def root(self) -> Path:
        """What names of files are relative to, and what none of them leaves."""

    def read(self, name: str, expected: StoredModality = IMAGES) -> tuple[bytes, ExternalPart]:
        """Read a file, or a member of a tar: `FOLDER/NAME.tar/MEMBER`; `expected` names it where it is too large.

        Raises:
            SampleError: it is too large, or no such member.
            DatasetError: it lies outside of the root, behind a link.
            OSError: it is not there, or storage failed.
        """

    def image(self, content: bytes, part: ExternalPart, expected: StoredModality = IMAGES) -> ImagePart:
        """Take an image, clip or video that was read; what begins as none is refused in the words of `expected`.

        Raises:
            SampleError: it cannot be used.
        """

    def note_read(self, part: ExternalPart) -> None:
        """Note a file that was read and is no image of the shard, so that it is read again when it changes.

        Raises:
            SampleError: there are too many files.
        """

    def note_unusable(self, name: str) -> None:
        """Note a file that no image was read from, so that it is looked at again when there is another one.

        Raises:
            OSError: storage failed.
        """


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
    external: ImageFiles | None = None
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
