"""Cutting a batch into microbatches of similar token sums (FlexSP, section 3.5)."""

import numpy as np

from dataserver.planning.samples import I64


def chunk_bounds(lengths: I64, num_chunks: int) -> I64:
    """Contiguous chunks whose largest token sum is smallest (eq. 24), exactly. O(n chunks).

    Sort the lengths, longest first, before: sequences of similar lengths then share a microbatch.

    Args:
        lengths: int64 [n], tokens.
        num_chunks: number of chunks, 1 to n.

    Returns:
        int64 [num_chunks + 1]: chunk i is [bounds[i], bounds[i + 1]); the earliest cuts among equals.

    Raises:
        ValueError: there cannot be that many chunks.
    """
    from dataserver.planning.kernels import grouping

    if not 1 <= num_chunks <= len(lengths):
        raise ValueError(f"{len(lengths)} sequences cannot be cut into {num_chunks} chunks; use 1 to {len(lengths)}")
    bounds: I64 = grouping.chunk_bounds(np.ascontiguousarray(lengths, np.int64), num_chunks)
    return bounds
