"""Rows of whole colocated plans on real sizes."""

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np
from benchmarks.rows import Row

from dataserver.planning.identity import Job, parse_job
from dataserver.planning.jobspec import SPECIAL_TOKENS
from dataserver.planning.plan import StepPlan
from dataserver.planning.planner import explain, plan_step
from planning_rows.steps import SEQ_LEN, laion_sizes, resampled

SEEDS = range(20)
RANKS, RANKS_PER_NODE = 128, 8
NAMES = ("encoder", "backbone", "generator")


def rows(folder: Path) -> list[Row]:
    """All rows of this part.

    Args:
        folder: laion-mini.
    """
    sizes, found = laion_sizes(folder), []
    for name, count, packed, changes in (
        ("1,920 sequences of one sample", 1_920, False, {}),
        ("the same, balance lpt_search", 1_920, False, {"balance": "lpt_search"}),
        ("the same, all padded in microbatches of five", 1_920, False, {"balance": "lpt_search", "padded": True}),
        ("12,000 samples packed to 8,192 tokens", 12_000, True, {}),
    ):
        found += _rows(f"colocated on 128 ranks, {name}", sizes, count, packed, changes)
    return found


def make_job(batch: int, packed: bool, changes: Mapping[str, object]) -> Job:
    """ViT-H, Llama 7B and a 1B generator on every rank; `changes` are fields of all modules."""
    ids = dict.fromkeys(SPECIAL_TOKENS, 0)
    return parse_job(
        {
            "stream": {
                "datasets": [{"name": "laion", "fingerprint": "0" * 64}],
                "tokenizer": {"name": "any", "digest": "0" * 64, "vocab_size": 1, **ids},
                "seq_len": SEQ_LEN,
                "global_batch": batch,
                "packing": {"enabled": packed},
                "generation": {"ratio": "0.5"},
            },
            "execution": {
                "modules": [{"name": name, "kind": name, "dp": RANKS, **changes} for name in NAMES],
                "layout": {"kind": "colocated", "ranks_per_node": RANKS_PER_NODE},
                "microbatch": 1 if packed else 5,
                "end": {"steps": 1},
            },
        }
    )


def _rows(
    name: str,
    sizes: tuple[np.ndarray, np.ndarray, np.ndarray],
    count: int,
    packed: bool,
    changes: Mapping[str, object],
) -> list[Row]:
    ratios, gains, times, shares = [], [], [], []
    for seed in SEEDS:
        job = make_job(count // RANKS * RANKS, packed, changes)
        samples = resampled(job, sizes, count, seed)
        if packed:
            job = make_job(-(-int(samples.tokens.sum()) * 100 // (97 * SEQ_LEN * RANKS)) * RANKS, packed, changes)
        plan_step(job, seed, samples)
        started = time.thread_time()
        plan = plan_step(job, seed, samples)
        times.append(1e3 * (time.thread_time() - started))
        summary = explain(job, plan)
        ratios.append(summary.after.makespan_ns / summary.bound_ns)
        gains.append(summary.before.makespan_ns / summary.after.makespan_ns)
        shares.append(_crossing(plan))
    return [
        Row(
            name,
            f"{median(ratios):.4f} x bound, worst {max(ratios):.4f}; {median(gains):.3f} x as fast as the sampling "
            f"layout (least {min(gains):.3f}); {median(times):.0f} ms, worst {max(times):.0f}",
            "never slower, < 250 ms",
            min(gains) >= 1 and max(times) < 250,
        ),
        Row("  rows that leave their node", f"{median(shares):.3f} of all that move", "", None),
    ]


def _crossing(plan: StepPlan) -> float:
    """Share of the rows between modules that leave their node."""
    crossing = sum(
        int(r.rows[r.source_rank // RANKS_PER_NODE != r.target_rank // RANKS_PER_NODE].sum()) for r in plan.routings
    )
    return crossing / sum(int(r.rows.sum()) for r in plan.routings)
