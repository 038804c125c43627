"""Positions in time, height and width of the tokens of samples with images (M-RoPE, arXiv 2409.12191, section 2.1)."""

import numpy as np

from dataserver.planning import I64


def rotary_positions(positions: I64, cu_lengths: I64, slots: I64, blocks: I64, times: I64 | None = None) -> I64:
    """The three positions of each token, int64 [3, T], starting again with every sample.

    Those of text are alike. The tokens of an image have the image's position in time, and their block's row and column
    beyond it in the others; what follows goes on behind the longer side. The groups of frames of a video are such
    images one after the other, each at its own time beyond that of the first; what follows goes on behind the longer
    side of one group, however many there are, as in transformers 5.

    Args:
        positions: [T], of each token in its sample.
        cu_lengths: [samples + 1], first token of each sample.
        slots: [E], the tokens of images, image by image; those of one image are consecutive.
        blocks: [images, 2], rows and columns of merge-blocks of each image, a token each; of all groups of a video.
        times: where there are videos, [images, 3]: groups of each, 1 of images; and the steps along the axis of time
            from one to the next, a numerator and a denominator.
    """
    found = np.broadcast_to(positions, (3, len(positions))).astype(np.int64)
    if not len(blocks):
        return found
    rows = blocks.prod(axis=1)
    begins = np.cumsum(rows) - rows
    number, first = np.arange(len(slots)) - np.repeat(begins, rows), slots[begins]
    behind = np.zeros(len(positions) + 1, np.int64)
    depth, step, parts = np.ones((3, len(blocks)), np.int64) if times is None else times.T
    height, width = blocks[:, 0] // depth, blocks[:, 1]
    np.add.at(behind, first + rows, np.maximum(height, width) - rows)
    behind = np.cumsum(behind)[:-1]
    behind -= np.repeat(behind[np.minimum(cu_lengths[:-1], len(positions) - 1)], np.diff(cu_lengths))
    found += behind
    begin, height, width, step, parts = (np.repeat(a, rows) for a in (found[0, first], height, width, step, parts))
    row, column = number // width, number % width
    found[:, slots] = np.stack([begin + row // height * step // parts, begin + row % height, begin + column])
    return found
