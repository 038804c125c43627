"""Rows about FlexSP: the published experiment in its own cost model, capacities, compositions, bucketing."""

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from dataserver.planning.samples import I64
from dataserver.planning.sequence_parallel import (
    A100_CLUSTER,
    PROFILES,
    best_homogeneous_plan,
    group_compositions,
    group_costs,
    homogeneous_plan,
    plan_groups,
    searched_homogeneous_plan,
    usable_lengths,
)
from dataserver.planning.sequence_parallel.bucketing import bucket_ends, equal_interval_ends, rounded_up
from dataserver.planning.sequence_parallel.chunking import chunk_bounds

sys.path.insert(0, str(Path(__file__).parents[1]))
from planning_rows.row import Row

WIKIPEDIA = Path(__file__).parents[3] / "shared" / "data" / "flexsp" / "wikipedia_lengths.npy"
NUM_BATCHES, BATCH = 40, 512
RATIOS = {"7b-192k": 1.745, "13b-192k": 1.678, "30b-192k": 1.575}
"""Static / ours to reach; the measured ratios of the paper are 1.72, 1.59 and 1.64."""
BEST_HOMOGENEOUS = {
    "7b-192k": 1.34,
    "7b-384k": 1.32,
    "13b-192k": 1.31,
    "13b-384k": 1.21,
    "30b-192k": 1.23,
    "30b-384k": 1.18,
}
"""Static / best homogeneous (FlexSP-BatchAda), as measured in the paper (Figure 4); to reach within 6 %."""
CAPACITIES = [6449, 6407, 6483, 6427, 6627, 6538]


def rows() -> list[Row]:
    """All rows of this part; takes about fifteen seconds."""
    if not WIKIPEDIA.is_file():
        missing = Row("FlexSP, Wikipedia lengths", f"{WIKIPEDIA} is missing", "the lengths are there", False)
        return [_capacities(), _compositions(), missing]
    return [
        _capacities(),
        _compositions(),
        *(row for name in PROFILES for row in _figure_4(name)),
        *(_table_4(name) for name in ("7b-192k", "7b-384k")),
    ]


def _batches(name: str) -> list[I64]:
    """The global batches of the published experiment."""
    lengths = usable_lengths(np.load(WIKIPEDIA), 384_000 if name.endswith("384k") else 192_000)
    return [lengths[BATCH * b : BATCH * (b + 1)] for b in range(NUM_BATCHES)]


def _capacities() -> Row:
    found = [group_costs(profile, A100_CLUSTER).device_tokens for profile in PROFILES.values()]
    shown, wanted = (" / ".join(str(n) for n in numbers) for numbers in (found, CAPACITIES))
    return Row("FlexSP device token capacities, 7B 13B 30B at 192K / 384K", shown, wanted, found == CAPACITIES)


def _compositions() -> Row:
    found = [len(group_compositions(64, 2)), len(group_compositions(64))]
    return Row(
        "FlexSP group compositions of 64 GPUs from degree 2, 1",
        f"{found[0]}, {found[1]}",
        "202, 1828",
        found == [202, 1828],
    )


def _figure_4(name: str) -> list[Row]:
    """Sums over the batches, as iterations of one run; planning in CPU time, kernels loaded."""
    costs = group_costs(PROFILES[name], A100_CLUSTER)
    batches = _batches(name)
    plan_groups(batches[0], costs)
    ours, spent = [], []
    for batch in batches:
        begin = time.thread_time()
        ours.append(plan_groups(batch, costs))
        spent.append(1000 * (time.thread_time() - begin))
    seconds = sum(plan.time_ns for plan in ours) / 1e9 / NUM_BATCHES
    bound = sum(plan.bound_ns for plan in ours) / 1e9 / NUM_BATCHES
    static, adaptive, searched = (
        sum(planner(batch, costs).time_ns for batch in batches) / 1e9 / NUM_BATCHES
        for planner in (homogeneous_plan, best_homogeneous_plan, searched_homogeneous_plan)
    )
    wanted = RATIOS.get(name)
    title = f"FlexSP {name}, Wikipedia, 512 sequences, 64 GPUs, 40 batches"
    measured = f"{static / seconds:.3f} ({static:.2f} s / {seconds:.2f} s; bound {bound:.2f} s)"
    target = "" if wanted is None else f">= {wanted}"
    published, ratio = BEST_HOMOGENEOUS[name], static / adaptive
    stronger = f"by our search {static / searched:.3f}"
    return [
        Row(f"{title}: static / ours", measured, target, None if wanted is None else static / seconds >= wanted),
        Row(
            f"{title}: static / best homogeneous",
            f"{ratio:.3f} ({100 * (ratio / published - 1):+.1f} %); {stronger}",
            f"within 6 % of {published}",
            abs(ratio / published - 1) <= 0.06,
        ),
        Row(
            f"{title}: planning",
            f"median {statistics.median(spent):.1f} ms, worst {max(spent):.1f} ms",
            "< 100 ms per batch",
            max(spent) < 100,
        ),
    ]


def _table_4(name: str) -> Row:
    """Largest error of 16 buckets in each of the fewest chunks."""
    capacity = group_costs(PROFILES[name], A100_CLUSTER).cluster_tokens
    worst = []
    for ends in (bucket_ends, equal_interval_ends):
        errors = []
        for batch in _batches(name):
            ordered = np.sort(batch)[::-1]
            cuts = chunk_bounds(ordered, -(-int(ordered.sum()) // capacity))
            chunks = [ordered[a:b][::-1] for a, b in pairwise(cuts)]
            wrong = sum(int((rounded_up(c, ends(c, min(16, len(c)))) - c).sum()) for c in chunks)
            errors.append(wrong / int(ordered.sum()))
        worst.append(100 * max(errors))
    return Row(
        f"FlexSP {name}: largest bucketing error, dynamic programme and equal intervals",
        f"{worst[0]:.2f} %, {worst[1]:.1f} %",
        "<= 2.3 % (paper 2.3 %, 22.1 %)",
        worst[0] <= 2.3,
    )
