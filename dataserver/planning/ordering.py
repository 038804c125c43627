"""Order of the microbatches of one backbone rank."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning.samples import I64


def disttrain_order(forward_ns: Sequence[I64], backward_ns: Sequence[I64]) -> list[int]:
    """DistTrain's Algorithm 2 (inter-microbatch reordering, section 5.3) for 1F1B.

    The smallest microbatch goes first, so that all stages start early; the p - 1 next smallest go last, where their
    intervals cannot be filled; the others fill the intervals in which the first stage waits, each by the closest fit.
    The first interval, from the first forward to the first backward, takes p - 1 microbatches; interval i lasts as long
    as the slowest later stage works on microbatch i.

    Args:
        forward_ns: for each of the p stages int64 [l]: forward time of each microbatch.
        backward_ns: the same for backward.

    Returns:
        A permutation of range(l).
    """
    from dataserver.planning.kernels import ordering

    forward, backward = np.array(forward_ns, np.int64), np.array(backward_ns, np.int64)
    ascending = np.argsort(forward.sum(axis=0), kind="stable")
    order: list[int] = ordering.disttrain_order(forward, backward, ascending).tolist()
    return order
