"""What a shard was seen to hold while its samples were made, for what is said of it as a whole."""

import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dataserver.dataset.shards.unread import is_about

Named = TypeVar("Named")


@dataclass(slots=True)
class Seen:
    """What a tar was seen to hold, in samples that are left out too."""

    keys: set[str] = field(default_factory=set)
    has_images: bool = False
    num_unused: Counter[str] = field(default_factory=Counter)
    """Members that claim to be of a modality that is ignored, by its name."""
    num_long_clips: int = 0
    """Clips of samples that are longer than any job reads."""
    lone_images: dict[str, str] = field(default_factory=dict)
    """Keys of images without a text, by what they share with other spellings of theirs."""
    without_text: set[str] = field(default_factory=set)
    """Keys of images that none of their members gives a text."""
    num_keyless: int = 0
    """Members whose names have no dot, which belong to no sample."""
    first_keyless: str = ""

    def note_keyless(self, name: str) -> None:
        """Count a member that has no key; those that are hidden or tell of the dataset are none of its samples."""
        base = name.rpartition("/")[2]
        if not (base.startswith(".") or is_about(base)):
            self.first_keyless = self.first_keyless or name
            self.num_keyless += 1

    def keyless(self) -> str:
        """Say how many members have no key; nothing where all have one."""
        if not self.num_keyless:
            return ""
        what = f"{self.num_keyless} members have no dot in their names and belong to no sample"
        return f"{what}, the first is {self.first_keyless!a}; members are called KEY.TYPE"

    def images_by_last_part(self) -> Mapping[str, str]:
        """The same by what follows the last slash of each, where it is that of one image alone."""
        return by_last_part(self.lone_images)


def by_last_part(keys: Mapping[str, Named]) -> dict[str, Named]:
    """Return what stands for keys by what follows the last slash of each; nothing where that is one of several."""
    counts = Counter(key.rpartition("/")[2] for key in keys)
    last_parts = ((key.rpartition("/")[2], found) for key, found in keys.items())
    return {part: found for part, found in last_parts if counts[part] == 1}


def without_spelling(key: str) -> str:
    """Return what a key shares with those that differ from it in case or in the form of Unicode alone."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", key).casefold())
