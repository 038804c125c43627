"""What an index knows of the samples of a shard, in columns."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from dataserver.planning import I32, I64, U8, Bool
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.item_sizes import VideoLengths, item_grids


@dataclass(frozen=True, slots=True, eq=False)
class ChatColumns:
    """What the index knows of n conversations with e answers beside their tokens, in row order."""

    targets: I64
    """int64 [n]: targets of the loss."""
    end_offsets: I64
    """int64 [n + 1]: first answer of each."""
    end_text: I64
    """int64 [e]: tokens up to the end of an answer, without those that stand for images."""
    end_images: I64
    """int64 [e]: images up to there."""
    end_targets: I64
    """int64 [e]: targets up to there."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardColumns:
    """What the index knows of the n samples of a shard with their t texts and m images, in row order."""

    text_offsets: I64
    """int64 [n + 1]: first text of each sample."""
    text_tokens: NDArray[Any]
    """Integers [t]: tokens of each text."""
    image_offsets: I64
    """int64 [n + 1]: first image of each sample."""
    image_width: I32
    """int32 [m]: upright width of each image or frame in pixels; of a clip the samples of a channel."""
    image_height: I32
    """int32 [m]: upright height of each image or frame in pixels; of a clip its samples in a second."""
    caption_tokens: I64 | None = None
    """int64 [captions, n]: tokens of each caption, where samples draw one; the texts are then the longest ones."""
    image_modality: U8 | None = None
    """uint8 [m]: what each is, an image, a clip or a video; None where all are images."""
    lengths: VideoLengths | None = None
    """Lengths of videos, where there are any."""
    chats: ChatColumns | None = None
    """Columns of conversations: each sample is one text."""
    kinds: U8 | None = None
    """uint8 [t + m]: 0 of a text, 1 of an image, in document order; None where nobody asks."""

    def grids(
        self, images: I64 | slice, offsets: I64, sizing: Sizing, lone: Bool | None = None
    ) -> tuple[I32, I32, dict[str, NDArray[Any]]]:
        """The `item_grids` of some images, which are those of samples: the first of each is in `offsets`."""
        modality = None if self.image_modality is None else self.image_modality[images]
        lengths = None if self.lengths is None else self.lengths.pick(images)
        return item_grids(offsets, self.image_width[images], self.image_height[images], modality, sizing, lone, lengths)
