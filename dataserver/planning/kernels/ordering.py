"""Kernels that order the microbatches of a rank."""

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.kernels.arrays import copy_to
from dataserver.planning.kernels.compiler import inlined_part, kernel


def disttrain_orders(forward: I64, backward: I64, ascending: I64) -> I64:
    """DistTrain's Algorithm 2, rank by rank; see `simulation.orders.disttrain_orders`.

    Args:
        forward: int64 [r, p, l]: forward time of each rank's microbatches in each stage.
        backward: int64 [r, p, l].
        ascending: int64 [r, l]: the microbatches of each rank by size.

    Returns:
        int64 [r, l]: the microbatches in their new order.
    """
    orders, count = np.empty_like(ascending), ascending.shape[1]
    _order_each(forward, backward, ascending, orders, np.empty(count, np.int64), np.zeros(count, np.bool_))
    return orders


@kernel
def _order_each(forward: I64, backward: I64, ascending: I64, orders: I64, middle: I64, waiting: Bool) -> None:
    for rank in range(len(ascending)):
        _order(forward[rank], backward[rank], ascending[rank], orders[rank], middle, waiting)


@inlined_part
def _order(forward: I64, backward: I64, ascending: I64, order: I64, middle: I64, waiting: Bool) -> None:
    num_stages, count = forward.shape
    if count <= num_stages or num_stages == 1:
        copy_to(order, ascending)
        return
    order[0] = ascending[0]
    for last in range(1, num_stages):
        order[count - num_stages + last] = ascending[last]
    # middle[:left]: the microbatches without a place, by number, so that the lower one wins ties. Of `order`, the first
    # `placed` and the last p - 1 places are taken.
    for place in range(num_stages, count):
        waiting[ascending[place]] = True
    left = 0
    for microbatch in range(count):
        if waiting[microbatch]:
            waiting[microbatch] = False  # for the next rank
            middle[left] = microbatch
            left += 1
    interval = 0  # of the first interval, what is not filled yet, ns
    for s in range(1, num_stages):
        interval += forward[s, order[0]] + backward[s, order[0]]
    for place in range(1, count - num_stages + 1):
        if place < num_stages:  # the first interval places p - 1 in advance
            wanted = interval // (num_stages - place)
        else:
            follows, wanted = order[place - num_stages + 1], 0
            for s in range(1, num_stages):
                wanted = max(wanted, forward[s, follows] + backward[s, follows])
            wanted -= backward[0, follows]
        left = _take_closest(middle, left, forward[0], wanted, order, place)
        interval -= forward[0, order[place]]


@inlined_part
def _take_closest(middle: I64, left: int, time: I64, wanted: int, order: I64, place: int) -> int:
    """Put the candidate whose time is closest to the wanted one (the lower on ties) in its place; how many are left."""
    best, distance = 0, abs(time[middle[0]] - wanted)
    for i in range(1, left):
        here = abs(time[middle[i]] - wanted)
        if here < distance:
            best, distance = i, here
    order[place] = middle[best]
    for i in range(best, left - 1):
        middle[i] = middle[i + 1]
    return left - 1
