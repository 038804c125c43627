"""How members become samples: how names are cut into keys, which images count, and where further texts lie."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataserver.dataset.shards.captions import CaptionSource
from dataserver.dataset.shards.members import Split
from dataserver.dataset.shards.modalities import AUDIO, ONLY_IMAGES, VIDEO, Media
from dataserver.dataset.shards.tar import split_at_last_dot, split_name


@dataclass(frozen=True, slots=True)
class SampleRules:
    """The rules by which members of a shard become samples."""

    to_last_dot: bool = False
    """Whether a key ends at the last dot of a name, not at the first one."""
    all_images: bool = False
    """Whether a sample has all its images, not the first one alone."""
    captions: tuple[CaptionSource, ...] = ()
    """Texts besides a sample's own that are looked for in its members."""
    images: frozenset[str] = frozenset()
    """Extensions of the members that images may be; all where it is empty."""
    media: Media = ONLY_IMAGES
    """What members are parts of their samples."""
    are_chats: bool = False
    """Whether every sample is a conversation, whose messages are stored."""
    drops_images: bool = False
    """Whether a document is served without its images that are missing or broken; else it is left out."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of images that have none among their members, by key."""

    def unused(self, extension: str) -> str:
        """The modality of a member that is not served, by its extension; empty where it is none of these."""
        kind = extension.rpartition(".")[2]
        if any(kind in modality.suffixes for modality in self.media):
            return ""
        return next((modality.name for modality in (AUDIO, VIDEO) if kind in modality.suffixes), "")

    @property
    def split(self) -> Split:
        """What splits a member name into key and extension."""
        return split_at_last_dot if self.to_last_dot else split_name
