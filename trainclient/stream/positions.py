"""Where the patches of images stand. numpy alone: it takes one core, where torch would wake all of them for that."""

import numpy as np

from trainclient.stream.microbatch import Array


def patch_positions(grid: Array, merge: int) -> Array:
    """Row and column of every patch of images, int64 [P, 2], in the order of the stream: block after block.

    Args:
        grid: rows and columns of each image, in patches; int [I, 2].
        merge: side of a block.
    """
    count, block = grid.prod(1, dtype=np.int64), merge**2
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    blocks_in_row = np.repeat(grid[:, 1] // merge, count)
    within = number % block
    row = number // block // blocks_in_row * merge + within // merge
    column = number // block % blocks_in_row * merge + within % merge
    return np.stack([row, column], 1)
