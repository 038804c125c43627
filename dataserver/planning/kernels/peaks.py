"""Local search for an assignment of batches to ranks with which no node sends or takes much more than others."""

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.kernels.arrays import first_largest, largest
from dataserver.planning.kernels.compiler import kernel, part

LOOKS_AT_ONCE = 1 << 17
"""Swaps that are looked at between two yield points, up to the end of a sweep over all."""


def lower_peaks(near: I64, home: I64, most_bytes: int, budget: int) -> I64:
    """Swap the nodes of batches as long as that lowers the sum of the peaks, best swap first.

    In a transfer a node sends what batches elsewhere exchange with its ranks, and takes what its batches exchange
    with ranks elsewhere. The larger of these is its load, and the largest load of any node the transfer's peak. Ties
    go to the swap that leaves the fewest bytes between nodes, then to the lower batches.

    Args:
        near: int64 [transfers, nodes, batches], bytes that each batch exchanges with the ranks of each node.
        home: int64 [batches], the node of each batch.
        most_bytes: bytes between nodes, over all transfers, that no swap may exceed.
        budget: swaps that may be looked at; the search ends after the sweep over all that reaches it.

    Returns:
        int64 [batches], the node of each batch.
    """
    transfers, nodes, _ = near.shape
    home = home.copy()
    sent, taken = np.zeros((2, transfers, nodes), np.int64)
    size = np.zeros((transfers, len(home)), np.int64)
    # Of each transfer: a swap changes two nodes, so one of the three heaviest keeps its load.
    heaviest, load = np.empty((transfers, 3), np.int64), np.empty(nodes, np.int64)
    state = np.array([0, most_bytes], np.int64)
    while _lower_peaks(near, home, budget, LOOKS_AT_ONCE, state, sent, taken, size, heaviest, load):
        yield_point()
    return home


@kernel
def _lower_peaks(
    near: I64,
    home: I64,
    budget: int,
    at_once: int,
    state: I64,
    sent: I64,
    taken: I64,
    size: I64,
    heaviest: I64,
    load: I64,
) -> bool:
    """Go on from `state`: swaps looked at, bytes to spare; whether there is more to look at."""
    looked, spare = state[0], state[1]
    most = min(budget, looked + at_once)
    if looked == 0:
        _add_loads(near, home, sent, taken, size)
        for transfer in range(len(near)):
            for node in range(near.shape[1]):
                spare -= sent[transfer, node]
    while looked < most:
        best = _find_heaviest(sent, taken, heaviest, load)
        peaks, least, first, second = best, 0, -1, -1
        for a in range(len(home)):
            if not _is_peak(heaviest, home[a]):
                continue  # no peak would fall
            for b in range(len(home)):
                if home[a] == home[b]:
                    continue
                looked += 1
                more = _more_bytes(near, home, a, b)
                if more <= spare:
                    found = _peaks_after(near, size, sent, taken, heaviest, home, a, b)
                    if found < best or (found == best < peaks and more < least):
                        best, least, first, second = found, more, a, b
        if first < 0:
            return False
        spare -= least
        _swap(near, size, sent, taken, home, first, second)
    state[0], state[1] = looked, spare
    return bool(looked < budget)


@part
def _add_loads(near: I64, home: I64, sent: I64, taken: I64, size: I64) -> None:
    """Fill in `size`, bytes of each batch over each transfer, and what nodes send and take, [transfers, nodes]."""
    for transfer in range(len(near)):
        for batch in range(len(home)):
            node = home[batch]
            for other in range(near.shape[1]):
                sent[transfer, other] += near[transfer, other, batch]
                size[transfer, batch] += near[transfer, other, batch]
            sent[transfer, node] -= near[transfer, node, batch]
            taken[transfer, node] += size[transfer, batch] - near[transfer, node, batch]


@part
def _find_heaviest(sent: I64, taken: I64, heaviest: I64, load: I64) -> int:
    """Fill in the three nodes with the largest loads of each transfer, -1 if there are fewer. Returns their sum."""
    peaks = 0
    for transfer in range(len(sent)):
        for node in range(len(load)):
            load[node] = max(sent[transfer, node], taken[transfer, node])
        peaks += largest(load)
        for place in range(3):
            heaviest[transfer, place] = -1
            if place < len(load):
                heaviest[transfer, place] = first_largest(load)
                load[heaviest[transfer, place]] = -1
    return peaks


@part
def _is_peak(heaviest: I64, node: int) -> bool:
    """Whether a node is the heaviest over some transfer."""
    transfer = 0
    while transfer < len(heaviest) and heaviest[transfer, 0] != node:
        transfer += 1
    return transfer < len(heaviest)


@part
def _more_bytes(near: I64, home: I64, a: int, b: int) -> int:
    """What the swap of two batches adds to the bytes between nodes."""
    more = 0
    for transfer in range(len(near)):
        more += near[transfer, home[a], a] - near[transfer, home[b], a]
        more += near[transfer, home[b], b] - near[transfer, home[a], b]
    return more


@part
def _peaks_after(near: I64, size: I64, sent: I64, taken: I64, heaviest: I64, home: I64, a: int, b: int) -> int:
    """The sum of the peaks after the swap of two batches."""
    peaks = 0
    for transfer in range(len(near)):
        peak = 0
        for node in heaviest[transfer]:
            if node >= 0 and node != home[a] and node != home[b]:
                peak = max(sent[transfer, node], taken[transfer, node])
                break
        for goes, comes in ((a, b), (b, a)):
            node = home[goes]
            # bytes that stayed on the node and will leave it, and the reverse
            left, joined = near[transfer, node, goes], near[transfer, node, comes]
            peak = max(peak, sent[transfer, node] + left - joined)
            peak = max(peak, taken[transfer, node] - (size[transfer, goes] - left) + (size[transfer, comes] - joined))
        peaks += peak
    return peaks


@part
def _swap(near: I64, size: I64, sent: I64, taken: I64, home: I64, a: int, b: int) -> None:
    """Exchange the nodes of `a` and `b`, and bring what each node sends and takes up to date."""
    for transfer in range(len(near)):
        for goes, comes in ((a, b), (b, a)):
            node = home[goes]
            left, joined = near[transfer, node, goes], near[transfer, node, comes]
            sent[transfer, node] += left - joined
            taken[transfer, node] += (size[transfer, comes] - joined) - (size[transfer, goes] - left)
    home[a], home[b] = home[b], home[a]
