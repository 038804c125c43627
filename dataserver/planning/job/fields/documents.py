"""How long documents become several samples."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from dataserver.planning.job.fields.values import Modality, Positive, SpecModel


class SplitAt(StrEnum):
    """Where a document is split that is longer than a sequence, or has more items than its budget."""

    ITEMS = "items"
    """Where an item begins that no longer fits. A text that is longer than a whole part is split between two of its
    tokens, where the part is full; an image, a clip or a video never."""
    VIDEOS = "videos"
    """As `items`, and a video is in one part with a clip that stands directly behind it, as its sound does."""


class ItemBudget(SpecModel):
    """How many items something may have."""

    max_images: Positive | None = None
    """Most images; by default any number."""
    max_clips: Positive | None = None
    """Most clips of audio; by default any number."""
    max_videos: Positive | None = None
    """Most videos; by default any number."""

    @property
    def budget(self) -> tuple[int | None, int | None, int | None]:
        """Most images, clips and videos."""
        return self.max_images, self.max_clips, self.max_videos


class DocumentSpec(ItemBudget):
    """How the documents of a dataset become samples. A part has at most so many images, clips and videos."""

    split: SplitAt = SplitAt.ITEMS
    """Where a document is split; each part is a sample of its own, with BOS and EOS around it. Only the last part of a
    document has its EOS as a target."""
    together: bool = False
    """Whether the parts of a document follow each other, and share a sequence if they fit. By default each part is
    shuffled by itself."""


BUDGET_FIELDS: Final[Mapping[Modality, str]] = MappingProxyType(
    {Modality.IMAGE: "max_images", Modality.AUDIO: "max_clips", Modality.VIDEO: "max_videos"}
)
"""The fields of `ItemBudget.budget`, in its order."""
