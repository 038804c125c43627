"""Rows about colocated layouts: a balanced arrangement per phase beside one arrangement for all of them."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.rows import Row

from dataserver.planning.balancing import Balancer, bin_totals, lower_bound, padded, searched, traffic_between
from dataserver.planning.colocated.assignment import Exchange, as_numbered, assign_batches
from dataserver.planning.samples import I64

SEEDS = range(20)
SEQUENCES_PER_RANK, RANKS_PER_NODE, ROW_BYTES = 15, 8, 8_192


@dataclass(frozen=True)
class Phase:
    """The items of one module; the last phase of a step is the backbone's."""

    name: str
    loads: I64
    sequence: I64
    """Of each item."""
    balancer: Balancer = searched
    capacity: int | None = None

    def times(self, rank: I64, ranks: int) -> I64:
        """Of each rank."""
        return bin_totals(self.loads, rank, ranks, padded=self.balancer is padded)

    def bound(self, ranks: int) -> int:
        """What the slowest rank of no arrangement falls below; padded, the balancer is optimal."""
        if self.balancer is padded:
            return int(self.times(padded(self.loads, ranks), ranks).max())
        return lower_bound(self.loads, ranks, self.capacity)


def rows() -> list[Row]:
    """All rows of this part; takes about a minute."""
    return [row for ranks, pad in ((128, False), (128, True), (1_024, False)) for row in _colocated(ranks, pad)]


def make_step(seed: int, ranks: int, pad_audio: bool) -> list[Phase]:
    """Two images and one audio clip for each sequence on average, all sizes log-normal."""
    draw = np.random.default_rng([seed, ranks])
    count = SEQUENCES_PER_RANK * ranks
    phases = []
    for name, per_sequence, sigma, balancer in (
        ("vit", 2, 0.75, searched),
        ("whisper", 1, 1.0, padded if pad_audio else searched),
    ):
        sequence = np.sort(draw.integers(0, count, per_sequence * count))
        loads = (draw.lognormal(0, sigma, len(sequence)) * 1_000_000).astype(np.int64)
        phases.append(Phase(name, loads, sequence, balancer))
    loads = (draw.lognormal(0, 0.6, count) * 6_000_000).astype(np.int64)
    return [*phases, Phase("llm", loads, np.arange(count), capacity=SEQUENCES_PER_RANK)]


def _arranged(phases: Sequence[Phase], ranks: int) -> tuple[list[I64], list[Exchange], dict[str, I64]]:
    """The batch of each item of each phase, what the batches exchange, and the ranks that take them."""
    batches = [p.balancer(p.loads, ranks, p.capacity) for p in phases]
    exchanges = []
    for phase, batch in zip(phases[:-1], batches, strict=False):
        target, size = batches[-1][phase.sequence], phase.loads // 5_000 * ROW_BYTES
        traffic = traffic_between(batch, target, size, ranks, ranks)
        exchanges.append(Exchange(phase.name, phases[-1].name, traffic, np.arange(ranks) // RANKS_PER_NODE))
    return batches, exchanges, assign_batches(as_numbered([p.name for p in phases], ranks), exchanges)


def _colocated(ranks: int, pad_audio: bool) -> list[Row]:
    gains, gaps, shares, peaks, times = [], [], [], [], []
    for seed in SEEDS:
        phases = make_step(seed, ranks, pad_audio)
        batches, exchanges, assigned = _arranged(phases, ranks)
        started = time.thread_time_ns()
        _arranged(phases, ranks)
        times.append((time.thread_time_ns() - started) * 1e-6)
        step = sum(int(p.times(assigned[p.name][b], ranks).max()) for p, b in zip(phases, batches, strict=True))
        gains.append(_step_of_one_arrangement(phases, ranks) / step)
        gaps.append(step / sum(p.bound(ranks) for p in phases))
        numbered = as_numbered([p.name for p in phases], ranks)
        moved, same = (sum(e.bytes_between_nodes(a) for e in exchanges) for a in (assigned, numbered))
        peak, same_peak = (sum(e.peak(a) for e in exchanges) for a in (assigned, numbered))
        shares.append(moved / same)
        peaks.append(peak / same_peak)
    audio = "whisper (padded)" if pad_audio else "whisper"
    name = f"colocated vit + {audio} + llm, {SEQUENCES_PER_RANK * ranks:,} sequences on {ranks:,} ranks"
    return [
        Row(
            f"{name}: step time, all phases one after the other",
            f"{_spread(gaps, '.6f')} x bound in {_spread(times, '.1f')} ms; balanced by the backbone alone / this: "
            f"{statistics.median(gains):.3f} (least {min(gains):.3f})",
            "no slower than balanced by the backbone alone",
            min(gains) >= 1,
        ),
        Row(
            "same, between nodes of 8: all bytes, and those of the busiest node of each exchange",
            f"{_spread(shares, '.3f')}, {_spread(peaks, '.3f')} of those of batches as numbered",
            "never above those of batches as numbered",
            max(*shares, *peaks) <= 1,
        ),
    ]


def _step_of_one_arrangement(phases: Sequence[Phase], ranks: int) -> int:
    """Pre-balancing: images and clips stay with their sequence, and sequences are balanced by the backbone's cost.

    Then no embedding crosses ranks: the bytes between nodes are what the balance of the other phases costs.
    """
    rank = searched(phases[-1].loads, ranks, SEQUENCES_PER_RANK)
    return sum(int(p.times(rank[p.sequence], ranks).max()) for p in phases)


def _spread(values: list[float], form: str) -> str:
    return f"{format(statistics.median(values), form)} (worst {format(max(values), form)})"
