"""Positions in time, height and width of the tokens of samples with images (M-RoPE, arXiv 2409.12191, section 2.1)."""

import numpy as np

from dataserver.planning import I64


def rotary_positions(positions: I64, cu_lengths: I64, slots: I64, blocks: I64) -> I64:
    """The three positions of each token, int64 [3, T], starting again with every sample.

    Those of text are alike. The tokens of an image have the image's position in time, and their block's row and column
    beyond it in the others; what follows goes on behind the longer side.

    Args:
        positions: [T], of each token in its sample.
        cu_lengths: [samples + 1], first token of each sample.
        slots: [E], the tokens of images, image by image; those of one image are consecutive.
        blocks: [images, 2], rows and columns of merge-blocks of each image, a token each.
    """
    found = np.broadcast_to(positions, (3, len(positions))).astype(np.int64)
    if not len(blocks):
        return found
    rows = blocks.prod(axis=1)
    begins = np.cumsum(rows) - rows
    number, first = np.arange(len(slots)) - np.repeat(begins, rows), slots[begins]
    behind = np.zeros(len(positions) + 1, np.int64)
    np.add.at(behind, first + rows, blocks.max(axis=1) - rows)
    behind = np.cumsum(behind)[:-1]
    behind -= np.repeat(behind[np.minimum(cu_lengths[:-1], len(positions) - 1)], np.diff(cu_lengths))
    found += behind
    begin, width = np.repeat(found[0, first], rows), np.repeat(blocks[:, 1], rows)
    found[:, slots] = np.stack([begin, begin + number // width, begin + number % width])
    return found
