"""How encoder and generator share the devices that a backbone leaves: DistTrain's convex problem, solved exactly.

With x devices of an encoder and z of a generator, x + z = R, a wave takes c + a / x in the one and d + b / z in the
other. A step of K + 1 waves takes (DistTrain, arXiv 2408.04275, section 4)

    c + a / x + d + b / z + K max(L, c + a / x, d + b / z)

beside what the backbone's choice fixes; of interleaved chunks, no less than that with a smaller K. It is convex in x: a
maximum of three convex functions, whose minimum is at a stationary point of one of them or where two cross. All six are
known in closed form. That bounds every pair of degrees; of those whose bound is below the best so far, all legal ranks
are looked at, with a / x and b / z of whole images (`whole_images`): these are no less, and fall with x and z as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainclient.orchestrate.choice import at_least
from trainclient.orchestrate.cluster import Cluster
from trainclient.orchestrate.costs import Option
from trainclient.orchestrate.whole_images import busiest_shares
from trainclient.orchestrate.workload import F64


@dataclass(frozen=True, slots=True)
class Spine:
    """What a choice for the backbone leaves to decide."""

    gpus: int
    waves: int
    sequences: float
    """Sequences of a wave, in all ranks of the backbone."""
    stage_ns: float
    """Forward and backward of a wave in one stage of the backbone; of interleaved chunks, in one chunk of it."""
    alone_ns: float
    """A wave's path through the backbone and back, with all transfers."""
    sync_ns: float
    held: int
    """Waves that the encoder holds at once; a generator holds one."""
    rest_ns: float = 0
    """Interleaved chunks: nanoseconds of a wave in the other chunks of a stage."""
    ahead: float = 0
    """Share of waves that an encoder has ready when it is their turn, since it works while other chunks are run."""

    @property
    def least_ns(self) -> float:
        """The step if encoder and generator took no time."""
        return self.alone_ns + (self.stage_ns + self.rest_ns) * (self.waves - 1) + self.sync_ns

    def steady_ns(self, encoder_ns: Any, generator_ns: Any) -> Any:
        """A further wave, if it takes so long in encoder and generator; numbers or arrays."""
        others = np.maximum(self.stage_ns, generator_ns)
        later = np.maximum(0.0, encoder_ns - others)  # than all others
        return np.maximum(encoder_ns, others + (1 - self.ahead) * later + self.rest_ns)


@dataclass(frozen=True, slots=True)
class Side:
    """An encoder or a generator at one degree, beside a spine."""

    option: Option
    fixed_ns: float
    work_ns: float
    """Work of a wave in all ranks, in nanoseconds."""
    sync_ns: float
    """Time of sums over ranks, with two of them or more."""
    fewest: int
    """Data-parallel ranks that memory asks for."""
    most: int
    """Data-parallel ranks that all have an item in a mean wave."""
    shares: F64
    """The part of the work that the busiest of 1, 2, ... ranks does, for as many as there are devices for."""

    def wave_ns(self, ranks: Any) -> Any:
        """Forward and backward of a wave with so many ranks; a number, or an array."""
        return self.fixed_ns + self.work_ns * self.shares[ranks - 1]

    @property
    def tp(self) -> int:
        """Number of devices of a rank."""
        return self.option.tp

    @property
    def encodes(self) -> bool:
        """Whether it works before the backbone."""
        return self.option.network.role.feeds


def _held(option: Option, spine: Spine) -> int:
    """Waves that a module holds at once."""
    return spine.held if option.network.role.feeds and option.network.gradient_passes else 1


def side(option: Option, spine: Spine, cluster: Cluster) -> Side | None:
    """A module at one degree beside a spine; None where no number of ranks holds it."""
    held = _held(option, spine)
    items = option.load.items * spine.sequences
    all_ranks = max(1, (cluster.gpus - spine.gpus) // option.tp)
    most = max(1, min(int(items), all_ranks))
    free = cluster.memory_bytes - option.static_bytes(1)
    optimizer = option.optimizer_bytes(1)
    wave, work = spine.sequences * held * option.sequence_bytes, option.load.largest * option.work_bytes
    both = wave + spine.sequences * option.load.rows * option.work_bytes
    fewest = max(
        at_least(optimizer + both, free),
        at_least(optimizer + wave, free - work),
        at_least(optimizer, free - work - option.load.largest * option.unit_bytes),
    )
    if fewest > most:
        return None
    shares = busiest_shares(option.load, option.cost, spine.waves, spine.sequences, cluster.gpus)[:all_ranks]
    return Side(
        option, option.fixed_ns, option.sequence_ns * spine.sequences, option.sync_ns(2, 1, cluster), fewest, most,
        shares,
    )  # fmt: skip


def stage_bytes(option: Option, spine: Spine, ranks: int) -> tuple[float, float, float]:
    """What a device of a side module holds: in all; of weights, gradients and optimizer states; while it computes."""
    states = option.static_bytes(1) + option.optimizer_bytes(1) / ranks
    rows = spine.sequences / ranks * option.load.rows
    work = max(rows, option.load.largest) * option.work_bytes
    return states + rows * _held(option, spine) * option.unit_bytes + work, states, work


def step_ns(spine: Spine, sides: Sequence[Side], ranks: Sequence[int]) -> float:
    """Time of a step: the objective that is minimised."""
    return sum(parts(spine, sides, ranks).values())


def parts(spine: Spine, sides: Sequence[Side], ranks: Sequence[int]) -> dict[str, float]:
    """What adds up to a step."""
    times = [float(s.wave_ns(r)) for s, r in zip(sides, ranks, strict=True)]
    syncs = [s.sync_ns for s, r in zip(sides, ranks, strict=True) if r > 1]
    encoder = max((t for s, t in zip(sides, times, strict=True) if s.encodes), default=0.0)
    generator = max((t for s, t in zip(sides, times, strict=True) if not s.encodes), default=0.0)
    return {
        "waves": float(spine.steady_ns(encoder, generator)) * (spine.waves - 1),
        "filling the pipeline": spine.alone_ns + (encoder + generator),  # encoders work beside each other
        "gradients": max([spine.sync_ns, *syncs]),
    }


def share(
    spine: Spine, kinds: Sequence[Sequence[Side]], devices: int, below: float
) -> tuple[float, tuple[Side, ...], tuple[int, ...]] | None:
    """The fastest degrees and ranks of no, one or two modules on at most so many devices; None if not `below`.

    Exact: no legal degrees and ranks are faster.
    """
    if not kinds:
        return (spine.least_ns, (), ()) if spine.least_ns < below else None
    if len(kinds) == 1:
        found = [
            (step_ns(spine, (s,), (r,)), (s,), (r,))
            for s in kinds[0]
            for r in {s.fewest, min(s.most, devices // s.tp)}
            if s.fewest <= r <= devices // s.tp
        ]
        best = min(found, key=lambda f: (f[0], f[1][0].tp * f[2][0]), default=None)
        return best if best is not None and best[0] < below else None
    return _share_two(spine, kinds[0], kinds[1], devices, below)


def _share_two(
    spine: Spine, first: Sequence[Side], second: Sequence[Side], devices: int, below: float
) -> tuple[float, tuple[Side, ...], tuple[int, ...]] | None:
    pairs = [(e, g) for e in first for g in second if e.tp * e.fewest + g.tp * g.fewest <= devices]
    if not pairs:
        return None
    bounds = lower_bounds(spine, pairs, devices)
    best: tuple[float, tuple[Side, ...], tuple[int, ...]] | None = None
    for number in np.argsort(bounds, kind="stable").tolist():
        if bounds[number] * (1 - 1e-9) >= below:
            break
        encoder, generator = pairs[number]
        found = _all_ranks(spine, encoder, generator, devices)
        if found[0] < below:
            best, below = (found[0], pairs[number], found[1]), found[0]
    return best


def lower_bounds(spine: Spine, pairs: Sequence[tuple[Side, Side]], devices: int) -> F64:
    """The least time of each pair of degrees if devices could be divided at will. float64 [pairs]."""
    rows = [(e.fixed_ns, e.work_ns * e.tp, e.tp * e.fewest, g.fixed_ns, g.work_ns * g.tp, g.tp * g.fewest)
            for e, g in pairs]  # fmt: skip
    c, a, least, d, b, other = np.array(rows, np.float64).T
    late = (spine.waves - 1) * (1 - spine.ahead)
    found: F64 = least_of_two((c, a, least), (d, b, other), 1 + late, spine.stage_ns, devices)
    return found + spine.alone_ns + (spine.rest_ns + spine.ahead * spine.stage_ns) * (spine.waves - 1) + spine.sync_ns


Curve = tuple[F64, F64, F64]
"""Modules beside spines: what a wave takes with any devices, what it takes times those, and the fewest devices."""


def least_of_two(first: Curve, second: Curve, waves: Any, level: Any, devices: Any) -> F64:
    """Encoder, generator and the slowest stage of `waves` - 1 further waves, if devices could be divided at will.

    Numbers, or arrays that go together.
    """
    (c, a, least), (d, b, other) = first, second
    most, more = devices - other, waves - 1
    best = np.full(np.broadcast(c, level).shape, np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        roots = [(np.sqrt(a * i), np.sqrt(b * j)) for i, j in ((1, 1), (waves, 1), (1, waves))]
        stationary = [devices * i / (i + j) for i, j in roots]
        linear = (c - d) * devices - a - b
        crossing = 2 * a * devices / (np.sqrt(linear**2 + 4 * (c - d) * a * devices) - linear)
        for point in (*stationary, a / (level - c), devices - b / (level - d), crossing):
            x = np.clip(np.nan_to_num(point, nan=1.0), least, most)
            encoder, generator = c + a / x, d + b / (devices - x)
            steady = more * np.maximum(level, np.maximum(encoder, generator))
            best = np.minimum(best, encoder + generator + steady)
    return best


def _all_ranks(spine: Spine, e: Side, g: Side, devices: int) -> tuple[float, tuple[int, int]]:
    """The fastest ranks of two modules: for each number of the one, the fewest or the most of the other."""
    ranks = np.arange(e.fewest, min(e.most, (devices - g.tp * g.fewest) // e.tp) + 1)
    most = np.minimum(g.most, (devices - e.tp * ranks) // g.tp)
    encoder = e.wave_ns(ranks)
    best, chosen = np.inf, (0, 0)
    for others in (most, np.full_like(most, g.fewest)):
        generator = g.wave_ns(others)
        sync = np.maximum(np.where(ranks > 1, e.sync_ns, 0), np.where(others > 1, g.sync_ns, 0))
        steady = spine.steady_ns(encoder, generator) * (spine.waves - 1)
        times = spine.alone_ns + (encoder + generator) + steady + np.maximum(spine.sync_ns, sync)
        at = int(times.argmin())
        if times[at] < best:
            best, chosen = float(times[at]), (int(ranks[at]), int(others[at]))
    return best, chosen
