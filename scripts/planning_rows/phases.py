"""Rows about colocated layouts: a balanced arrangement per phase beside one arrangement for all of them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row, spread

from dataserver.planning import I64
from dataserver.planning.balancing import (
    Balancer,
    bin_totals,
    lower_bound,
    padded,
    searched,
    traffic_between,
)
from dataserver.planning.layouts.colocated.assignment import Exchange, as_numbered, assign_batches

ROW_BYTES = 8_192


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one size and skew."""

    ranks: int
    ranks_per_node: int = 8
    sequences_per_rank: int = 15
    sigmas: tuple[float, float, float] = (0.75, 1.0, 0.6)
    """Standard deviations of the logarithms of the loads of images, clips and sequences."""
    padded: bool = False
    """Whether clips are padded to the longest one."""
    seeds: range = range(20)


CASES = (
    Case(128),
    Case(128, padded=True),
    Case(1_024),
    Case(96, 4, 10, (1.2, 0.6, 0.9), seeds=range(100, 120)),
    Case(96, 4, 10, (1.2, 0.6, 0.9), padded=True, seeds=range(100, 120)),
    Case(768, 4, 20, (0.5, 0.8, 0.4), seeds=range(100, 105)),
)
"""Three, and the held-out variant of each."""


@dataclass(frozen=True)
class Phase:
    """The items of one module; the last phase of a step is the backbone's."""

    name: str
    loads: I64
    sequence: I64
    """The sequence that each item belongs to."""
    balancer: Balancer = searched
    capacity: int | None = None

    def times(self, rank: I64, ranks: int) -> I64:
        """Return the time that each rank takes."""
        return bin_totals(self.loads, rank, ranks, padded=self.balancer is padded)

    def bound(self, ranks: int) -> int:
        """What the slowest rank of no arrangement falls below; padded, the balancer is optimal."""
        if self.balancer is padded:
            return int(self.times(padded(self.loads, ranks), ranks).max())
        return lower_bound(self.loads, ranks, self.capacity)


def rows() -> list[Row]:
    """All rows of this part; takes about two minutes."""
    return [row for case in CASES for row in _colocated(case)]


def make_step(seed: int, case: Case) -> list[Phase]:
    """Two images and one audio clip for each sequence on average, all sizes log-normal."""
    draw, (images, clips, texts) = np.random.default_rng([seed, case.ranks]), case.sigmas
    count = case.sequences_per_rank * case.ranks
    phases = []
    for name, per_sequence, sigma, balancer in (
        ("vit", 2, images, searched),
        ("whisper", 1, clips, padded if case.padded else searched),
    ):
        sequence = np.sort(draw.integers(0, count, per_sequence * count))
        loads = (draw.lognormal(0, sigma, len(sequence)) * 1_000_000).astype(np.int64)
        phases.append(Phase(name, loads, sequence, balancer))
    loads = (draw.lognormal(0, texts, count) * 6_000_000).astype(np.int64)
    return [*phases, Phase("llm", loads, np.arange(count), capacity=case.sequences_per_rank)]


def _arranged(phases: Sequence[Phase], case: Case) -> tuple[list[I64], list[Exchange], dict[str, I64]]:
    """The batch of each item of each phase, what the batches exchange, and the ranks that take them."""
    ranks = case.ranks
    batches = [p.balancer(p.loads, ranks, p.capacity) for p in phases]
    exchanges = []
    for phase, batch in zip(phases[:-1], batches, strict=False):
        target, size = batches[-1][phase.sequence], phase.loads // 5_000 * ROW_BYTES
        traffic = traffic_between(batch, target, size, ranks, ranks)
        exchanges.append(Exchange(phase.name, phases[-1].name, traffic, np.arange(ranks) // case.ranks_per_node))
    return batches, exchanges, assign_batches(as_numbered([p.name for p in phases], ranks), exchanges)


def _colocated(case: Case) -> list[Row]:
    ranks = case.ranks
    gains, gaps, shares, peaks, times = [], [], [], [], []
    for seed in case.seeds:
        phases = make_step(seed, case)
        _arranged(phases, case)
        (batches, exchanges, assigned), spent = timed(_arranged, phases, case)
        times.append(spent)
        step = sum(int(p.times(assigned[p.name][b], ranks).max()) for p, b in zip(phases, batches, strict=True))
        gains.append(_step_of_one_arrangement(phases, case) / step)
        gaps.append(step / sum(p.bound(ranks) for p in phases))
        numbered = as_numbered([p.name for p in phases], ranks)
        moved, same = (sum(e.bytes_between_nodes(a) for e in exchanges) for a in (assigned, numbered))
        peak, same_peak = (sum(e.peak(a) for e in exchanges) for a in (assigned, numbered))
        shares.append(moved / same)
        peaks.append(peak / same_peak)
    audio = "whisper (padded)" if case.padded else "whisper"
    name = f"colocated vit + {audio} + llm, {case.sequences_per_rank * ranks:,} sequences on {ranks:,} ranks"
    return [
        Row(
            f"{name}: step time, all phases one after the other",
            f"{spread(gaps, '.6f')} x bound in {spread(times, '.1f')} ms; balanced by the backbone alone / this: "
            f"{statistics.median(gains):.3f} (least {min(gains):.3f})",
            "no slower than balanced by the backbone alone",
            min(gains) >= 1,
        ),
        Row(
            f"same, between nodes of {case.ranks_per_node}: all bytes, and those of the busiest node of each exchange",
            f"{spread(shares, '.3f')}, {spread(peaks, '.3f')} of those of batches as numbered",
            "never above those of batches as numbered",
            max(*shares, *peaks) <= 1,
        ),
    ]


def _step_of_one_arrangement(phases: Sequence[Phase], case: Case) -> int:
    """Pre-balancing: images and clips stay with their sequence, and sequences are balanced by the backbone's cost.

    Then no embedding crosses ranks: the bytes between nodes are what the balance of the other phases costs.
    """
    ranks = case.ranks
    rank = searched(phases[-1].loads, ranks, case.sequences_per_rank)
    return sum(int(p.times(rank[p.sequence], ranks).max()) for p in phases)
