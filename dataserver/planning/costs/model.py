"""The cost model: times of microbatches, int64 nanoseconds. Costs are found in measured times by `fitting`."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Cost, Transfer


def forward_ns(cost: Cost, sizes: I64) -> I64:
    """Forward time of each item in the whole module: linear + quadratic in its patches or tokens.

    Args:
        cost: the module's time model.
        sizes: int64 [n], patches or tokens of each item, at most 2^22 (so that nothing overflows).

    Returns:
        int64 [n], nanoseconds.
    """
    pairs = sizes * (sizes if cost.window is None else np.minimum(sizes, cost.window))
    thousands = pairs // 1_000  # numpy divides by a number much faster than it finds quotient and rest together
    rest = pairs - thousands * 1_000
    quadratic = thousands * cost.quadratic_fs // 1_000 + rest * cost.quadratic_fs // 1_000_000
    time: I64 = sizes * cost.linear_ps // 1_000 + quadratic
    return time


def items_ns(cost: Cost, sizes: I64, depths: I64 | None) -> I64:
    """`forward_ns` of items; a video's groups of frames, int64 [n], do not attend to each other."""
    return forward_ns(cost, sizes) if depths is None else depths * forward_ns(cost, sizes // depths)


def backward_ns(cost: Cost, forward: I64) -> I64:
    """Backward time for a forward time, int64 of the same shape."""
    time: I64 = forward * cost.backward_percent // 100
    return np.asarray(time, np.int64)


def transfer_ns(transfer: Transfer | None, rows: I64) -> I64:
    """Time of transfers of so many rows, rounded up; 0 without a transfer.

    Args:
        transfer: between two modules, or the stages of one.
        rows: int64 of any shape, at most 2^29 each (so that nothing overflows).

    Returns:
        int64 of the same shape, nanoseconds.
    """
    if transfer is None:
        return np.zeros_like(rows)
    whole, rest = divmod(transfer.row_bytes * 1000, transfer.bytes_per_us)  # nanoseconds of a row
    time: I64 = transfer.latency_ns + rows * whole - (-rows * rest // transfer.bytes_per_us)
    return time
