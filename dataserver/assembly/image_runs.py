"""The tokens of an image or a video in a sequence: one for each embedding, with text before and between them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dataserver.planning import I32, I64
from dataserver.planning.job.fields import Sizing, Timestamps
from dataserver.planning.stream.item_sizes import VideoLengths, item_marks, item_tokens, video_sizing
from dataserver.planning.stream.samples import StepSamples, ranges
from dataserver.planning.stream.video_frames import group_tenths


class ImageRun(NamedTuple):
    """What the plan says of an image, a clip or a video of a sample that is understood."""

    embeddings: int
    """How many of the tokens are replaced by embeddings."""
    marks: int
    """Tokens of text around them (`Sizing.marks`, `VideoSizing.timestamps`)."""
    rows: int
    columns: int
    """How many columns the tiles stand in."""
    tenths: tuple[int, ...] = ()
    """Time of each group of frames of a video in tenths of a second, where text tells it."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the image, marks included."""
        return self.embeddings + self.marks


def images_of(samples: StepSamples, items: I64) -> I64:
    """The images, clips and videos of some samples. int64 [m], indices into those of the step."""
    first = samples.image_offsets[items]
    return ranges(first, samples.image_offsets[items + 1] - first)


def image_runs(sizing: Sizing, samples: StepSamples, items: I64, lengths: VideoLengths | None) -> list[list[ImageRun]]:
    """Return the images, clips and videos of some samples.

    Args:
        sizing: of the job.
        samples: those of the step.
        items: int64 [k]: indices into them.
        lengths: of `images_of`, where videos have timestamps.
    """
    index, counts = images_of(samples, items), np.diff(samples.image_offsets)[items]
    columns = [item_tokens(samples, sizing)[index], item_marks(samples, sizing)[index]]
    layout = samples.image_layout
    columns += [np.zeros_like(index)] * 2 if layout is None else [*layout[index, :2].T.astype(np.int64)]
    runs = list(map(ImageRun, *(column.tolist() for column in columns), _times(sizing, len(index), lengths)))
    return [runs[end - count : end] for end, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True)]


def _times(sizing: Sizing, number: int, lengths: VideoLengths | None) -> list[tuple[int, ...]]:
    """`ImageRun.tenths` of so many images, clips and videos."""
    video = video_sizing(sizing)
    if lengths is None or video.timestamps is None:
        return [()] * number
    each = zip(lengths.frames.tolist(), lengths.microseconds.tolist(), strict=True)
    return [tuple(group_tenths(frames, taken, video)) if frames else () for frames, taken in each]


def run_tokens(image: int, run: ImageRun, sizing: Sizing) -> Iterator[tuple[I32 | int, int, bool]]:
    """Token ids of an image, or one that is repeated; their number; and whether embeddings replace them.

    Args:
        image: id of the token that stands for an embedding.
        run: the image.
        sizing: with the marks.
    """
    marks, timestamps = sizing.marks, video_sizing(sizing).timestamps
    if run.tenths and timestamps is not None:
        yield from _group_tokens(image, run, timestamps)
        return
    if marks is None or not run.marks:
        yield image, run.embeddings, True
        return
    before: list[tuple[int, ...]] = [marks.alone]
    if run.rows * run.columns > 1:
        before = [marks.tiles[row][column] for row in range(run.rows) for column in range(run.columns)]
        for first in range(run.columns, len(before), run.columns):
            before[first] = marks.row_end + before[first]
        before.append(marks.whole)
    for ids in before:
        yield np.array(ids, np.int32), len(ids), False
        yield image, run.embeddings // len(before), True


def _group_tokens(image: int, run: ImageRun, timestamps: Timestamps) -> Iterator[tuple[I32 | int, int, bool]]:
    """`run_tokens` of a video whose groups of frames have their times before them."""
    for tenths in run.tenths:
        before = timestamps.ids_of(tenths)
        yield np.array(before, np.int32), len(before), False
        yield image, run.embeddings // len(run.tenths), True
        yield np.array(timestamps.end, np.int32), len(timestamps.end), False
