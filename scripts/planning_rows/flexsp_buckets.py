"""Sequences of similar lengths as one, to shrink the MILP (FlexSP, section 3.4)."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.kernels.compiler import kernel
from dataserver.planning.kernels.compositions import NEVER


def bucket_ends(lengths: I64, num_buckets: int) -> I64:
    """Contiguous buckets that round lengths up to each bucket's longest with the least error in all.

    The paper's dynamic programme, O(n^2 buckets): error[k][q] = min over j < k of error[j][q - 1] + the error of
    sequences j to k rounded up to the last of them. Ties go to the earliest start of the last bucket.

    Args:
        lengths: int64 [n], ascending.
        num_buckets: number of buckets, 1 to n.

    Returns:
        int64 [num_buckets]: bucket q ends before ends[q], and starts where the one before ends.

    Raises:
        ValueError: there cannot be that many buckets.
    """
    if not 1 <= num_buckets <= len(lengths):
        raise ValueError(f"{len(lengths)} sequences cannot fill {num_buckets} buckets; use 1 to {len(lengths)}")
    n = len(lengths)
    prefix, error = np.zeros(n + 1, np.int64), np.full((2, n + 1), NEVER, np.int64)
    prefix[1:] = np.cumsum(lengths)
    cuts, ends = np.zeros((num_buckets, n + 1), np.int64), np.empty(num_buckets, np.int64)
    _bucket_ends(np.ascontiguousarray(lengths, np.int64), prefix, error, cuts, ends)
    return ends


@kernel
def _bucket_ends(lengths: I64, prefix: I64, error: I64, cuts: I64, ends: I64) -> None:
    """Compiled `bucket_ends`: row bucket % 2 of `error` is that of the bucket before, the other one its own."""
    n, num_buckets = len(lengths), len(ends)
    error[0, 0] = 0
    for bucket in range(num_buckets):
        previous, own = error[bucket % 2], error[1 - bucket % 2]
        own[:] = NEVER
        for end in range(bucket + 1, n + 1):
            for start in range(bucket, end):
                value = previous[start] + lengths[end - 1] * (end - start) - (prefix[end] - prefix[start])
                if value < own[end]:
                    own[end], cuts[bucket, end] = value, start
    end = n
    for bucket in range(num_buckets - 1, -1, -1):
        ends[bucket] = end
        end = cuts[bucket, end]


def equal_interval_ends(lengths: I64, num_buckets: int) -> I64:
    """The naive buckets of Table 4: intervals of equal width from the shortest to the longest; empty ones are left out.

    Args:
        lengths: int64 [n], ascending, n >= 1.
        num_buckets: number of intervals.

    Returns:
        int64 [at most num_buckets], as of `bucket_ends`.
    """
    low, span = int(lengths[0]), int(lengths[-1] - lengths[0])
    limits = low + span * np.arange(1, num_buckets + 1, dtype=np.int64) // num_buckets
    return np.unique(np.searchsorted(lengths, limits, side="right"))


def rounded_up(lengths: I64, ends: I64) -> I64:
    """Each length as the longest of its bucket. int64 [n]."""
    return np.repeat(lengths[ends - 1], np.diff(ends, prepend=0))
