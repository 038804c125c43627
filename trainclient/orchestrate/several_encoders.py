"""How several encoders, and a generator if there is one, share the devices that a backbone leaves: solved exactly.

Encoders work beside each other, so a wave takes as long in them as in the slowest, T. For a given T each takes the
fewest devices with which it is as fast, whatever the others do. So all encoders together are like one: of as many
devices the least T that their sum allows. A step never gets shorter by a longer T or a slower generator, whose devices
are all that encoders leave. The sum of gradients depends on degrees too: for each value that it may have, all modules
whose sum takes longer are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dataserver.planning import I64
from trainclient.orchestrate.sharing import Side, Spine, step_ns
from trainclient.orchestrate.workload import F64


class Ways(NamedTuple):
    """Ways to run a module that no other one beats, by devices: more of them take less time."""

    devices: I64
    """Numbers of devices, int64 [n], ascending."""
    times: F64
    """float64 [n], nanoseconds of a wave, descending."""
    side: I64
    """int64 [n]: which of the module's sides each is."""
    ranks: I64
    """Ranks of each way, int64 [n]."""

    def within(self, times: F64) -> I64:
        """The way of fewest devices that takes no longer than each time, int64 [m]; n where there is none."""
        found: I64 = np.searchsorted(-self.times, -times, side="left")
        return found


def share_several(
    spine: Spine, kinds: Sequence[Sequence[Side]], devices: int, below: float
) -> tuple[float, tuple[Side, ...], tuple[int, ...]] | None:
    """The fastest degrees and ranks of encoders and at most one generator on at most so many devices.

    Args:
        spine: what the backbone leaves to decide.
        kinds: of each module, the degrees that it can have; at least one encodes.
        devices: that the backbone leaves.
        below: nanoseconds of a step.

    Returns:
        The step in nanoseconds, and of each module its degree and its ranks; None if none is faster than `below`.
    """
    best: tuple[float, tuple[Side, ...], tuple[int, ...]] | None = None
    for sync in sorted({max(spine.sync_ns, side.sync_ns) for sides in kinds for side in sides} | {spine.sync_ns}):
        found = _within_sync(spine, kinds, devices, sync)
        if found is not None and found[0] < below:
            best, below = found, found[0]
    return best


def _within_sync(
    spine: Spine, kinds: Sequence[Sequence[Side]], devices: int, sync: float
) -> tuple[float, tuple[Side, ...], tuple[int, ...]] | None:
    """The same of modules whose sums of gradients take at most so long."""
    ways = [_ways(sides, devices, sync) for sides in kinds]
    if any(not len(w.devices) for w in ways):
        return None
    encodes = [sides[0].encodes for sides in kinds]
    encoders = [w for w, feeds in zip(ways, encodes, strict=True) if feeds]
    times = np.unique(np.concatenate([w.times for w in encoders]))
    times = times[times >= max(float(w.times[-1]) for w in encoders)]  # that all of them reach
    taken = np.sum([w.devices[w.within(times)] for w in encoders], axis=0)
    times, taken = times[taken <= devices], taken[taken <= devices]
    other, made = np.zeros(len(times)), np.zeros(len(times), np.int64)
    generator = next((w for w, feeds in zip(ways, encodes, strict=True) if not feeds), None)
    if generator is not None:
        made = np.searchsorted(generator.devices, devices - taken, side="right") - 1
        times, taken, made = times[made >= 0], taken[made >= 0], made[made >= 0]
        other = generator.times[made]
    if not len(times):
        return None
    steps = times + other + spine.steady_ns(times, other) * (spine.waves - 1)
    at = int(np.lexsort((taken, steps))[0])
    chosen = [
        int(w.within(times[at : at + 1])[0]) if feeds else int(made[at]) for w, feeds in zip(ways, encodes, strict=True)
    ]
    picked = tuple(sides[int(w.side[n])] for sides, w, n in zip(kinds, ways, chosen, strict=True))
    ranks = tuple(int(w.ranks[n]) for w, n in zip(ways, chosen, strict=True))
    return step_ns(spine, picked, ranks), picked, ranks


def _ways(sides: Sequence[Side], devices: int, sync: float) -> Ways:
    """The ways to run a module on at most so many devices whose sum of gradients takes at most so long."""
    numbers, ranks = list[I64](), list[I64]()
    for number, side in enumerate(sides):
        most = min(side.most if side.sync_ns <= sync else 1, devices // side.tp)
        legal = np.arange(side.fewest, most + 1)
        ranks.append(legal)
        numbers.append(np.full(len(legal), number))
    side_of, rank = np.concatenate([[], *numbers]).astype(np.int64), np.concatenate([[], *ranks]).astype(np.int64)
    taken = np.array([side.tp for side in sides])[side_of] * rank
    times = np.concatenate([[], *(side.wave_ns(legal) for side, legal in zip(sides, ranks, strict=True))])
    order = np.lexsort((times, taken))
    least = np.minimum.accumulate(times[order]) if len(order) else times
    better = order[np.diff(least, prepend=np.inf) < 0]
    return Ways(taken[better].astype(np.int64), times[better], side_of[better], rank[better])
