"""The tokens of an image in a sequence: one for each embedding, with marks before and between them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dataserver.planning import I32, I64
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.item_sizes import item_marks, item_tokens
from dataserver.planning.stream.samples import StepSamples, ranges


class ImageRun(NamedTuple):
    """What the plan says of an image or a clip of a sample that is understood."""

    embeddings: int
    """How many of the tokens are replaced by embeddings."""
    marks: int
    """Tokens of text before and between them (`Sizing.marks`)."""
    rows: int
    columns: int
    """How many columns the tiles stand in."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the image, marks included."""
        return self.embeddings + self.marks


def image_runs(sizing: Sizing, samples: StepSamples, items: I64) -> list[list[ImageRun]]:
    """Return the images and clips of some samples.

    Args:
        sizing: of the job.
        samples: those of the step.
        items: int64 [k]: indices into them.
    """
    first = samples.image_offsets[items]
    counts = samples.image_offsets[items + 1] - first
    index = ranges(first, counts)
    columns = [item_tokens(samples, sizing)[index], item_marks(samples, sizing)[index]]
    layout = samples.image_layout
    columns += [np.zeros_like(index)] * 2 if layout is None else [*layout[index, :2].T.astype(np.int64)]
    runs = list(map(ImageRun, *(column.tolist() for column in columns)))
    return [runs[end - count : end] for end, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True)]


def run_tokens(image: int, run: ImageRun, sizing: Sizing) -> Iterator[tuple[I32 | int, int, bool]]:
    """Token ids of an image, or one that is repeated; their number; and whether embeddings replace them.

    Args:
        image: id of the token that stands for an embedding.
        run: the image.
        sizing: with the marks.
    """
    marks = sizing.marks
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
