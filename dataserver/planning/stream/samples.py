"""What is known of samples before anything is decoded, as structs of arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I32, I64, U8, U64, Bool
from dataserver.planning.job.fields import Modality

IMAGE: Final = 0
AUDIO: Final = 1
VIDEO: Final = 2
"""The numbers of images, clips and videos in `image_modality`."""
MODALITY_NUMBERS: Final[Mapping[Modality, int]] = MappingProxyType(
    {Modality.IMAGE: IMAGE, Modality.AUDIO: AUDIO, Modality.VIDEO: VIDEO}
)
ROW_BITS = 32
"""A sample's number is shard << ROW_BITS | row: the shard in name order, the row of that shard's index."""


def ranges(starts: I64, counts: I64) -> I64:
    """Concatenation of arange(start, start + count). int64 [sum of counts]."""
    found: I64 = np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return found


def sums_before(values: NDArray[Any]) -> I64:
    """The sum of the integers before each of n, and of all: of counts, where each begins and the last ends. [n + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])


def row_sums(values: NDArray[Any], offsets: I64) -> I64:
    """Sums of integers over rows: row r has the values from offsets[r] to before offsets[r + 1]. int64 [rows]."""
    return np.diff(sums_before(values)[offsets])


class Task(IntEnum):
    """What a sample trains; the numbers are those of the proto."""

    UNDERSTANDING = 1
    GENERATION = 2
    CONTRASTIVE = 3


@dataclass(frozen=True, slots=True, eq=False)
class SampleSizes:
    """The sizes of n samples with their m images."""

    text_tokens: I64
    """int64 [n]: tokens of all texts of the sample, before truncation."""
    image_offsets: I64
    """int64 [n + 1]: first image of each sample."""
    image_rows: I32
    """int32 [m]: rows of the image's patch grid; of a video those of all its groups of frames, one below the other."""
    image_columns: I32
    """int32 [m]: columns of the image's patch grid."""
    image_modality: U8 | None = field(default=None, kw_only=True)
    """uint8 [m]: what each is, an image, `AUDIO` or `VIDEO`; None where all are images. A clip has one row, with a
    column for each position of its tower."""
    image_depths: I32 | None = field(default=None, kw_only=True)
    """int32 [m]: groups of frames of each video, 1 of others; None where there is no video."""
    targets: I64 | None = field(default=None, kw_only=True)
    """int64 [n]: targets of the loss, where samples are conversations; of others all text tokens and EOS are."""
    image_layout: I32 | None = field(default=None, kw_only=True)
    """int32 [m, 6]: how each image is cut into tiles (`tiles`); None where none is. Its grid then has the rows of all
    parts one below the other."""
    parts: I64 | None = field(default=None, kw_only=True)
    """int64 [n, 4], where documents are split: number of the part that each is of its document, how many the document
    has, and the text tokens and images of the document before it. None where none is split."""

    image_texts: I64 | None = field(default=None, kw_only=True)
    """int64 [m]: text tokens of the sample before each image, where documents of several images may be generated."""
    image_marks: I32 | None = field(default=None, kw_only=True)
    """int32 [m]: tokens of the timestamps of each video, 0 of others; None where there are none."""

    def __len__(self) -> int:
        return len(self.text_tokens)

    @property
    def are_whole(self) -> Bool | None:
        """bool [n]: whether each is a whole document; None where all are."""
        return None if self.parts is None else self.parts[:, 1] == 1


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable(SampleSizes):
    """The samples of one shard that filter and quarantine leave, in row order."""

    row: I64
    """int64 [n]: row of the shard's index, the same for all parts of a document."""
    nominal: I64
    """int64 [n]: nominal tokens, the sample's length on the dataset's axis (`sizing.nominal_tokens`)."""
    caption_tokens: I64 | None = None
    """int64 [captions, n]: tokens of each caption, where samples draw one; `text_tokens` are then of the longest."""


@dataclass(frozen=True, slots=True, eq=False)
class StepSamples:
    """The n samples of a step in canonical order, with their m images."""

    dataset: I32
    """int32 [n]: position in the job's dataset list."""
    epoch: I64
    """int64 [n]: epoch of the dataset."""
    sample: U64
    """uint64 [n]: shard << ROW_BITS | row."""
    task: I32
    """int32 [n]: values of Task. Of a sample that is generated the last image is the target; those before it are
    understood."""
    text_tokens: I64
    """int64 [n]: text tokens that are kept."""
    truncated_tokens: I64
    """int64 [n]: text tokens that were cut off, or left out behind the target of a document."""
    tokens: I64
    """int64 [n]: backbone tokens of the whole sample."""
    image_offsets: I64
    """int64 [n + 1]: first image of each sample; images of a document behind its target are left out."""
    image_rows: I32
    """int32 [m]: height of each image in patches; of a video as in `SampleSizes`."""
    image_columns: I32
    """int32 [m]: width of each image in patches."""
    image_modality: U8 | None = None
    """uint8 [m]: as in `SampleSizes`."""
    image_depths: I32 | None = None
    """int32 [m]: as in `SampleSizes`."""
    targets: I64 | None = None
    """int64 [n]: targets of the loss, where any sample is a conversation or part of a document; else all text tokens
    and EOS are."""
    image_layout: I32 | None = None
    """int32 [m, 6]: as in `SampleSizes`."""
    parts: I64 | None = None
    """int64 [n, 4]: as in `SampleSizes`."""
    image_marks: I32 | None = None
    """int32 [m]: as in `SampleSizes`."""

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def num_targets(self) -> I64:
        """int64 [n]: targets of the loss of each sample that is understood."""
        return self.text_tokens + 1 if self.targets is None else self.targets

    @property
    def image_sample(self) -> I64:
        """int64 [m]: the sample of each image."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.image_offsets))

    def images_with(self, task: Task) -> tuple[I64, I64]:
        """The images of each sample that are understood, or generated: the first, and the first behind them.

        Returns:
            int64 [n] each; equal where a sample has none.
        """
        first, end, generated = self.image_offsets[:-1], self.image_offsets[1:], self.task == Task.GENERATION
        return (end - generated, end) if task is Task.GENERATION else (first, end - generated)

    def locate(self, images: I64) -> tuple[I64, I64]:
        """Where some images are: the sample of each, and its number within the whole document. int64 [k] each."""
        sample = np.searchsorted(self.image_offsets, images, side="right") - 1
        number = images - self.image_offsets[sample]
        return sample, number if self.parts is None else number + self.parts[sample, 3]

    @property
    def patches(self) -> I64:
        """int64 [m]: patches of each image, positions of each clip."""
        return self.image_rows.astype(np.int64) * self.image_columns

    def depths(self, images: I64) -> I64 | None:
        """Groups of frames of some of them, int64 [k]; None where there is no video."""
        return None if self.image_depths is None else self.image_depths[images].astype(np.int64)
