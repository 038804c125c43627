"""Rows about colocated layouts: a balanced arrangement per phase beside one arrangement for all of them.

Alone, from the folder scripts: python -m planning_rows.phases
"""

import statistics
import time

import numpy as np

from dataserver.planning.balancing import searched
from dataserver.planning.colocated.arranging import arrange_phases
from dataserver.planning.colocated.phases import Link, Phase, PhasePlan
from planning_rows.row import Row

SEEDS = range(20)
SEQUENCES_PER_RANK, RANKS_PER_NODE = 15, 8


def rows() -> list[Row]:
    """All rows of this part; takes about a minute."""
    return [row for ranks, padded in ((128, False), (128, True), (1_024, False)) for row in _colocated(ranks, padded)]


def make_step(seed: int, ranks: int, pad_audio: bool) -> tuple[list[Phase], list[Link]]:
    """Two images and one audio clip for each sequence on average, all sizes log-normal."""
    draw = np.random.default_rng([seed, ranks])
    count = SEQUENCES_PER_RANK * ranks
    phases, links = [], []
    for name, per_sequence, sigma, padded in (("vit", 2, 0.75, False), ("whisper", 1, 1.0, pad_audio)):
        sequence = np.sort(draw.integers(0, count, per_sequence * count))
        loads = (draw.lognormal(0, sigma, len(sequence)) * 1_000_000).astype(np.int64)
        phases.append(Phase(name, loads, sequence, padded=padded))
        here = np.arange(len(sequence))
        links.append(Link(name, "llm", here, sequence, loads // 5_000, 8_192))
    loads = (draw.lognormal(0, 0.6, count) * 6_000_000).astype(np.int64)
    return [*phases, Phase("llm", loads, np.arange(count), capacity=SEQUENCES_PER_RANK)], links


def _colocated(ranks: int, pad_audio: bool) -> list[Row]:
    node = np.arange(ranks) // RANKS_PER_NODE
    gains, gaps, shares, peaks, times = [], [], [], [], []
    for seed in SEEDS:
        phases, links = make_step(seed, ranks, pad_audio)
        plan = arrange_phases(phases, links, node)
        started = time.thread_time_ns()
        arrange_phases(phases, links, node)
        times.append((time.thread_time_ns() - started) * 1e-6)
        gains.append(_step_ns_of_one_arrangement(phases, ranks) / _step_ns(plan))
        gaps.append(_step_ns(plan) / sum(a.bound_ns for a in plan.arrangements))
        shares.append(plan.bytes_between_nodes / plan.identity_bytes)
        peaks.append(plan.peak_bytes / plan.identity_peak_bytes)
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
            "same, between nodes of 8: all bytes, and those of the busiest node of each hop",
            f"{_spread(shares, '.3f')}, {_spread(peaks, '.3f')} of the identity's",
            "never above the identity's",
            max(*shares, *peaks) <= 1,
        ),
    ]


def _step_ns(plan: PhasePlan) -> int:
    return sum(int(a.loads.max()) for a in plan.arrangements)


def _step_ns_of_one_arrangement(phases: list[Phase], ranks: int) -> int:
    """Pre-balancing: images and clips stay with their sequence, and sequences are balanced by the backbone's cost.

    Then no embedding crosses ranks: the bytes between nodes are what the balance of the other phases costs.
    """
    backbone = phases[-1]
    rank = searched(backbone.loads, ranks, SEQUENCES_PER_RANK)
    return sum(int(p.rank_loads(rank[p.sample], ranks).max()) for p in phases)


def _spread(values: list[float], form: str) -> str:
    return f"{format(statistics.median(values), form)} (worst {format(max(values), form)})"


if __name__ == "__main__":
    for row in rows():
        print(f"{row.name} | {row.measured} | {row.target} | {row.reached}")
