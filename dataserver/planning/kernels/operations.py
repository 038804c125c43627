"""Kernels over graphs of operations: when each starts, and how long many orders of microbatches take."""

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.kernels.arrays import copy_to
from dataserver.planning.kernels.compiler import kernel


def run_operations(
    durations: I64, follows: Bool, offsets: I64, after: I64, delay: I64, waits: I64
) -> tuple[I64, I64, I64]:
    """Start every operation as soon as all that it waits for have ended (topological order by counting, Kahn 1962).

    Args:
        durations: int64 [ops].
        follows: bool [ops]: whether operation i + 1 waits for operation i without delay.
        offsets: int64 [ops + 1], see `after`.
        after: int64 [d]: after[offsets[i] : offsets[i + 1]] wait for operation i too.
        delay: int64 [d]: how long after its end.
        waits: int64 [ops]: how many each waits for, negative for none that is ever run; changed.

    Returns:
        int64 [ops] starts, -1 if never; int64 [ops] the operation that each waited for last, -1 for none; int64 [run]
        the operations that were run, in an order in which none stands before what it waits for.
    """
    start, cause, order = np.full((3, len(durations)), -1, np.int64)
    run = _run_operations(durations, follows, offsets, after, delay, waits, start, cause, order)
    return start, cause, order[:run]


@kernel
def _run_operations(
    durations: I64,
    follows: Bool,
    offsets: I64,
    after: I64,
    delay: I64,
    waits: I64,
    start: I64,
    cause: I64,
    order: I64,
) -> int:
    # start[i]: latest end (with delay) so far of what i waits for; final when waits[i] is 0. order[:run] were run,
    # order[run:known] are ready.
    known = 0
    for i in range(len(durations)):
        if waits[i] == 0:
            start[i] = 0
            order[known] = i
            known += 1
    run = 0
    while run < known:
        i = order[run]
        run += 1
        end = start[i] + durations[i]
        if follows[i]:
            waits[i + 1] -= 1
            if end > start[i + 1]:
                start[i + 1], cause[i + 1] = end, i
            if waits[i + 1] == 0:
                order[known] = i + 1
                known += 1
        for d in range(offsets[i], offsets[i + 1]):
            other = after[d]
            waits[other] -= 1
            if end + delay[d] > start[other]:
                start[other], cause[other] = end + delay[d], i
            if waits[other] == 0:
                order[known] = other
                known += 1
    for i in range(len(durations)):
        if waits[i] > 0:
            start[i] = -1
    return known


LANES = 16
"""Orders that are swept together: the processor works on several at once, and the graph is read once for all."""


def run_orders(cell: I64, previous: I64, offsets: I64, needs: I64, delay: I64, times: I64, orders: I64) -> I64:
    """Makespan of each order: one sweep over operations that come after all that they wait for.

    Args:
        cell: int64 [ops]: (kind * blocks + block) * passes + pass.
        previous: int64 [ops]: the operation before it on its node, or -1.
        offsets: int64 [ops + 1], see `needs`.
        needs: int64 [d]: operation i waits for needs[offsets[i] : offsets[i + 1]].
        delay: int64 [d]: how long after their ends.
        times: int64 [2, blocks, microbatches].
        orders: int64 [k, passes]: the microbatch of each pass.

    Returns:
        int64 [k].
    """
    found, end = np.empty(len(orders), np.int64), np.empty((len(cell), LANES), np.int64)
    latest, at = np.empty(LANES, np.int64), np.zeros((orders.shape[1], LANES), np.int64)
    _run_orders(cell, previous, offsets, needs, delay, times, orders, found, end, latest, at)
    return found


@kernel
def _run_orders(
    cell: I64,
    previous: I64,
    offsets: I64,
    needs: I64,
    delay: I64,
    times: I64,
    orders: I64,
    found: I64,
    end: I64,
    latest: I64,
    at: I64,
) -> None:
    # end[i, o]: end of operation i under the o-th order of a batch; at[pass, o]: the microbatch. In the last batch the
    # lanes from `used` on keep older orders: they are computed too, and dropped.
    count, passes = orders.shape
    blocks = times.shape[1]
    for first in range(0, count, LANES):
        used = min(LANES, count - first)
        for o in range(used):
            for k in range(passes):
                at[k, o] = orders[first + o, k]
        latest[:] = 0
        for i in range(len(cell)):
            mine = end[i]
            if previous[i] >= 0:
                copy_to(mine, end[previous[i]])
            else:
                mine[:] = 0
            for d in range(offsets[i], offsets[i + 1]):
                other, later = end[needs[d]], delay[d]
                for o in range(LANES):
                    mine[o] = max(mine[o], other[o] + later)
            block = cell[i] // passes
            time, microbatch = times[block // blocks, block % blocks], at[cell[i] % passes]
            for o in range(LANES):
                mine[o] += time[microbatch[o]]
                latest[o] = max(latest[o], mine[o])
        for o in range(used):
            found[first + o] = latest[o]
