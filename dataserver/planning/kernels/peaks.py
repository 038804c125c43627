"""Local search for an assignment of batches to ranks with which no node sends or takes much more than others."""

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.kernels.arrays import first_largest, largest
from dataserver.planning.kernels.compiler import kernel, part

LOOKS_AT_ONCE = 1 << 17
"""Swaps that are looked at between two yield points, up to the end of a sweep over all."""


def lower_peaks(near: I64, home: I64, most_bytes: int, budget: int) -> I64:
    """Swap the nodes of batches as long as that lowers the sum of the peaks, best swap first.

    Over a hop a node sends what batches elsewhere exchange with its ranks, and takes what its batches exchange with
    ranks elsewhere. The larger of these is its load, and the largest load of any node the hop's peak. Ties go to the
    swap that leaves the fewest bytes between nodes, then to the lower batches.

    Args:
        near: int64 [hops, nodes, batches], bytes that each batch exchanges with the ranks of each node.
        home: int64 [batches], the node of each batch.
        most_bytes: bytes between nodes, over all hops, that no swap may exceed.
        budget: swaps that may be looked at; the search ends after the sweep over all that reaches it.

    Returns:
        int64 [batches], the node of each batch.
    """
    hops, nodes, _ = near.shape
    home = home.copy()
    sent, taken = np.zeros((2, hops, nodes), np.int64)
    size = np.zeros((hops, len(home)), np.int64)
    # Of each hop: a swap changes two nodes, so one of the three heaviest keeps its load.
    heaviest, load = np.empty((hops, 3), np.int64), np.empty(nodes, np.int64)
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
        for hop in range(len(near)):
            for node in range(near.shape[1]):
                spare -= sent[hop, node]
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
    """Fill in `size`, bytes of each batch over each hop, and add what each node sends and takes, [hops, nodes]."""
    for hop in range(len(near)):
        for batch in range(len(home)):
            node = home[batch]
            for other in range(near.shape[1]):
                sent[hop, other] += near[hop, other, batch]
                size[hop, batch] += near[hop, other, batch]
            sent[hop, node] -= near[hop, node, batch]
            taken[hop, node] += size[hop, batch] - near[hop, node, batch]


@part
def _find_heaviest(sent: I64, taken: I64, heaviest: I64, load: I64) -> int:
    """Fill in the three nodes with the largest loads of each hop, -1 if there are fewer. Returns the sum of peaks."""
    peaks = 0
    for hop in range(len(sent)):
        for node in range(len(load)):
            load[node] = max(sent[hop, node], taken[hop, node])
        peaks += largest(load)
        for place in range(3):
            heaviest[hop, place] = -1
            if place < len(load):
                heaviest[hop, place] = first_largest(load)
                load[heaviest[hop, place]] = -1
    return peaks


@part
def _is_peak(heaviest: I64, node: int) -> bool:
    """Whether a node is the heaviest over some hop."""
    hop = 0
    while hop < len(heaviest) and heaviest[hop, 0] != node:
        hop += 1
    return hop < len(heaviest)


@part
def _more_bytes(near: I64, home: I64, a: int, b: int) -> int:
    """What the swap of two batches adds to the bytes between nodes."""
    more = 0
    for hop in range(len(near)):
        more += near[hop, home[a], a] - near[hop, home[b], a]
        more += near[hop, home[b], b] - near[hop, home[a], b]
    return more


@part
def _peaks_after(near: I64, size: I64, sent: I64, taken: I64, heaviest: I64, home: I64, a: int, b: int) -> int:
    """The sum of the peaks after the swap of two batches."""
    peaks = 0
    for hop in range(len(near)):
        peak = 0
        for node in heaviest[hop]:
            if node >= 0 and node != home[a] and node != home[b]:
                peak = max(sent[hop, node], taken[hop, node])
                break
        for goes, comes in ((a, b), (b, a)):
            node = home[goes]
            # bytes that stayed on the node and will leave it, and the reverse
            left, joined = near[hop, node, goes], near[hop, node, comes]
            peak = max(peak, sent[hop, node] + left - joined)
            peak = max(peak, taken[hop, node] - (size[hop, goes] - left) + (size[hop, comes] - joined))
        peaks += peak
    return peaks


@part
def _swap(near: I64, size: I64, sent: I64, taken: I64, home: I64, a: int, b: int) -> None:
    """Carry out a swap."""
    for hop in range(len(near)):
        for goes, comes in ((a, b), (b, a)):
            node = home[goes]
            left, joined = near[hop, node, goes], near[hop, node, comes]
            sent[hop, node] += left - joined
            taken[hop, node] += (size[hop, comes] - joined) - (size[hop, goes] - left)
    home[a], home[b] = home[b], home[a]
