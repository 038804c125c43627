"""Compiled loops that order microbatches."""

import numpy as np

from dataserver.planning.kernels import kernel
from dataserver.planning.samples import I64


@kernel
def disttrain_order(forward: I64, backward: I64, ascending: I64) -> I64:
    """DistTrain's Algorithm 2; see `simulation.orders.disttrain_order`.

    Args:
        forward: int64 [p, l]: forward time of each microbatch in each stage.
        backward: int64 [p, l].
        ascending: int64 [l]: the microbatches by size.

    Returns:
        int64 [l]: the microbatches in their new order.
    """
    num_stages, count = forward.shape
    if count <= num_stages or num_stages == 1:
        return ascending
    order = np.empty(count, np.int64)
    order[0] = ascending[0]
    order[count - num_stages + 1 :] = ascending[1:num_stages]
    # middle[:left]: the microbatches without a place, by number, so that the lower one wins ties. Of `order`, the first
    # `placed` and the last p - 1 places are taken.
    middle = np.sort(ascending[num_stages:])
    left = len(middle)
    interval = 0  # of the first interval, what is not filled yet, ns
    for s in range(1, num_stages):
        interval += forward[s, order[0]] + backward[s, order[0]]
    placed = 1
    for place in range(num_stages - 1):
        if left == 0:
            break
        left = _take_closest(middle, left, forward[0], interval // (num_stages - 1 - place), order, placed)
        interval -= forward[0, order[placed]]
        placed += 1
    for number in range(1, count):
        if left == 0:
            break
        follows = order[number]  # number < placed: the first interval placed p - 1 in advance
        interval = 0
        for s in range(1, num_stages):
            interval = max(interval, forward[s, follows] + backward[s, follows])
        left = _take_closest(middle, left, forward[0], interval - backward[0, follows], order, placed)
        placed += 1
    return order


@kernel
def _take_closest(middle: I64, left: int, time: I64, wanted: int, order: I64, place: int) -> int:
    """Put the candidate whose time is closest to the wanted one (the lower on ties) in its place; how many are left."""
    best, distance = 0, abs(time[middle[0]] - wanted)
    for i in range(1, left):
        here = abs(time[middle[i]] - wanted)
        if here < distance:
            best, distance = i, here
    order[place] = middle[best]
    middle[best : left - 1] = middle[best + 1 : left].copy()
    return left - 1
