"""Rows of whole colocated plans on real sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row

from dataserver.planning.job.fields import SPECIAL_TOKENS
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import ablation, plan_step, timeline
from dataserver.reporting.ablation import mean_ablation
from planning_rows.steps import SEQ_LEN, Sizes, laion_sizes, resampled

NAMES = ("encoder", "backbone", "generator")


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one size, and what is changed in their job."""

    name: str
    samples: int
    packed: bool = False
    changes: Mapping[str, object] = field(default_factory=dict)
    """Fields that all modules get."""
    ranks: int = 128
    ranks_per_node: int = 8
    seeds: range = range(20)
    power: float = 1.0
    """Widths and heights are raised to it, around their median: the skew."""


HELD_OUT: Mapping[str, Any] = {"ranks": 96, "ranks_per_node": 4, "seeds": range(100, 120), "power": 0.7}
CASES = (
    Case("1,920 sequences of one sample", 1_920),
    Case("1,920, all padded in microbatches of five", 1_920, changes={"padded": True}),
    Case("12,000 samples packed to 8,192 tokens", 12_000, packed=True),
    Case("960 sequences of one sample", 960, **HELD_OUT),
    Case("960, all padded in microbatches of five", 960, changes={"padded": True}, **HELD_OUT),
    Case("7,000 samples packed to 8,192 tokens", 7_000, packed=True, **HELD_OUT),
)
"""Three, and their held-out variants on other ranks."""


def rows(folder: Path) -> list[Row]:
    """All rows of this part.

    Args:
        folder: laion-mini.
    """
    sizes = laion_sizes(folder)
    return [row for case in CASES for row in _rows(case, sizes)]


def make_job(case: Case, batch: int) -> Job:
    """ViT-H, Llama 7B and a 1B generator on every rank."""
    ids = dict.fromkeys(SPECIAL_TOKENS, 0)
    return parse_job(
        {
            "stream": {
                "datasets": [{"name": "laion", "fingerprint": "0" * 64}],
                "tokenizer": {"name": "any", "digest": "0" * 64, "vocab_size": 1, **ids},
                "seq_len": SEQ_LEN,
                "global_batch": batch,
                "packing": {"enabled": case.packed},
                "generation": {"ratio": "0.5"},
            },
            "execution": {
                "modules": [{"name": name, "kind": name, "dp": case.ranks, **case.changes} for name in NAMES],
                "layout": {"kind": "colocated", "ranks_per_node": case.ranks_per_node},
                "microbatch": 1 if case.packed else 5,
                "end": {"steps": 1},
            },
        }
    )


def _rows(case: Case, sizes: Sizes) -> list[Row]:
    tokens, *sides = sizes
    skewed = [(np.median(s) * (s / np.median(s)) ** case.power).astype(np.int32) for s in sides]
    ratios, times, shares, ablations = [], [], [], []
    for seed in case.seeds:
        job = make_job(case, case.samples // case.ranks * case.ranks)
        samples = resampled(job, (tokens, *skewed), case.samples, seed)
        if case.packed:
            job = make_job(case, -(-int(samples.tokens.sum()) * 100 // (97 * SEQ_LEN * case.ranks)) * case.ranks)
        plan_step(job, seed, samples)
        plan, spent = timed(plan_step, job, seed, samples)
        times.append(spent)
        ablations.append(ablation(job, plan))
        ratios.append(timeline(job.spec, plan).makespan_ns / layout_of(job.spec.execution).lower_bound_ns(job, plan))
        shares.append(_crossing(plan, case.ranks_per_node))
    gains = [(made[0].makespan_ns or 0) / (made[-1].makespan_ns or 1) for made in ablations]
    return [
        Row(
            f"colocated on {case.ranks} ranks, {case.name}",
            f"{median(ratios):.4f} x bound, worst {max(ratios):.4f}; {median(gains):.3f} x as fast as the sampling "
            f"layout (least {min(gains):.3f}); {median(times):.0f} ms, worst {max(times):.0f}",
            "never slower, < 250 ms",
            min(gains) >= 1 and max(times) < 250,
        ),
        *(
            Row(f"  {name}", f"{ms} ms, {before} of the one before, {first} of the first", "", None)
            for name, ms, before, first in (row.cells for row in mean_ablation(ablations))
        ),
        Row("  rows that leave their node", f"{median(shares):.3f} of all that move", "", None),
    ]


def _crossing(plan: StepPlan, ranks_per_node: int) -> float:
    """Share of the rows between modules that leave their node."""
    crossing = sum(
        int(r.rows[r.source_rank // ranks_per_node != r.target_rank // ranks_per_node].sum()) for r in plan.routings
    )
    return crossing / sum(int(r.rows.sum()) for r in plan.routings)
