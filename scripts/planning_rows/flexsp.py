"""Rows about FlexSP: the published experiment in its own cost model, capacities, compositions, bucketing."""

import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row

from dataserver.planning import I64
from dataserver.planning.job.fields import SPECIAL_TOKENS
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.grouped.compositions import group_compositions
from dataserver.planning.layouts.grouped.homogeneous import (
    best_homogeneous_plan,
    homogeneous_plan,
    searched_homogeneous_plan,
)
from dataserver.planning.layouts.grouped.search import chunk_bounds
from dataserver.planning.layouts.grouped.sequence_plan import plan_groups
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.samples import StepSamples, Task
from planning_rows.flexsp_buckets import bucket_ends, equal_interval_ends, rounded_up
from planning_rows.flexsp_profiles import A100_CLUSTER, PROFILES, group_costs, usable_lengths

LENGTHS = "wikipedia_lengths.npy"
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


def rows(folder: Path) -> list[Row]:
    """All rows of this part, with the lengths in a folder; takes about a minute.

    The published figures are those of one experiment. Its held-out variant draws fewer lengths for fewer devices, with
    a longer tail; no one has published what it should reach.
    """
    wikipedia = folder / LENGTHS
    if not wikipedia.is_file():
        missing = Row("FlexSP, Wikipedia lengths", f"{wikipedia} is missing", "the lengths are there", False)
        return [_capacities(), _compositions(), missing]
    found = {name: batches(folder, name) for name in PROFILES}
    return [
        _capacities(),
        _compositions(),
        *(row for name in PROFILES for row in _figure_4(name, found[name])),
        *(_table_4(name, found[name]) for name in ("7b-192k", "7b-384k")),
        _as_a_job("7b-192k", found["7b-192k"], images=False),
        _as_a_job("7b-192k", found["7b-192k"], images=True),
        *_held_out("7b-192k", 300, 7.2, 1.5),
        *_held_out("7b-192k", 512, 7.2, 1.5),
        *_held_out("7b-192k", 512, 7.5, 1.8),
    ]


def batches(folder: Path, name: str) -> list[I64]:
    """The global batches of the published experiment, from the lengths in a folder."""
    lengths = usable_lengths(np.load(folder / LENGTHS), 384_000 if name.endswith("384k") else 192_000)
    return [lengths[BATCH * b : BATCH * (b + 1)] for b in range(NUM_BATCHES)]


def _held_out(name: str, count: int, mean: float, sigma: float) -> list[Row]:
    """Log-normal lengths on 32 devices: at least as fast as the best single degree, and as quick to plan."""
    costs = group_costs(PROFILES[name], replace(A100_CLUSTER, num_devices=32), max_degree=32)
    ours, homogeneous, spent = [], [], []
    for seed in range(100, 120):
        drawn = np.random.default_rng(seed).lognormal(mean, sigma, count)
        lengths = usable_lengths(np.clip(drawn, 64, 90_000).astype(np.int64), 96_000)
        plan_groups(lengths, costs)
        plan, milliseconds = timed(plan_groups, lengths, costs)
        ours.append(plan.time_ns)
        spent.append(milliseconds)
        homogeneous.append(best_homogeneous_plan(lengths, costs).time_ns)
    ratios = [h / o for h, o in zip(homogeneous, ours, strict=True)]
    title = f"FlexSP {name}'s held-out variant, log-normal ({mean}, {sigma}), {count} sequences, 32 GPUs, 20 batches"
    text = f"median {statistics.median(ratios):.3f}, least {min(ratios):.3f}"
    times = f"median {statistics.median(spent):.1f} ms, worst {max(spent):.1f} ms"
    return [
        Row(f"{title}: best homogeneous / ours", text, "never slower", min(ratios) >= 1),
        Row(f"{title}: planning", times, "< 100 ms per batch", max(spent) < 100),
    ]


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


def _figure_4(name: str, batches: list[I64]) -> list[Row]:
    """Sums over the batches, as iterations of one run; planning in scaled CPU time, kernels loaded."""
    costs = group_costs(PROFILES[name], A100_CLUSTER)
    plan_groups(batches[0], costs)
    ours, spent = [], []
    for batch in batches:
        plan, milliseconds = timed(plan_groups, batch, costs)
        ours.append(plan)
        spent.append(milliseconds)
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


def _table_4(name: str, batches: list[I64]) -> Row:
    """Largest error of 16 buckets in each of the fewest chunks."""
    capacity = group_costs(PROFILES[name], A100_CLUSTER).cluster_tokens
    worst = []
    for ends in (bucket_ends, equal_interval_ends):
        errors = []
        for batch in batches:
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


def _as_a_job(name: str, batches: list[I64], images: bool) -> Row:
    """The published batches through `plan_step`: packing, candidates, arrangements and simulation included."""
    costs = group_costs(PROFILES[name], A100_CLUSTER)
    job, spent, equal = _job(name, images), [], True
    for number, batch in enumerate(batches):
        samples = _samples(batch, number, images)
        if not number:
            plan_step(job, number, samples)
        plan, milliseconds = timed(plan_step, job, number, samples)
        spent.append(milliseconds)
        equal &= images or plan.candidates[0].makespan_ns == plan_groups(batch, costs).time_ns
    beside = "beside an encoder on 16 and a generator on 8 ranks" if images else "its time that of plan_groups"
    return Row(
        f"FlexSP {name} as a job, 512 sequences, 64 GPUs, 40 batches, {beside}: whole plan",
        f"median {statistics.median(spent):.1f} ms, worst {max(spent):.1f} ms",
        "< 100 ms per batch",
        equal and max(spent) < 100,
    )


def _job(name: str, images: bool) -> Job:
    """A job with the published constants, half of them in the forward pass."""
    model, ids = PROFILES[name], dict.fromkeys(SPECIAL_TOKENS, 0)
    terms = {"microbatch_ns": model.fixed_ns, "linear_ps": model.linear_ps, "quadratic_fs": model.quadratic_fs}
    budget = group_costs(model, A100_CLUSTER).device_tokens * model.token_bytes
    backbone = {
        "name": "backbone",
        "kind": "backbone",
        "dp": A100_CLUSTER.num_devices,
        "cost": {**{term: value // 2 for term, value in terms.items()}, "backward_percent": 100},
        "memory": {"budget_bytes": budget, "unit_bytes": model.token_bytes},
    }
    layout = {
        "kind": "grouped",
        "max_degree": A100_CLUSTER.num_devices,
        "exchange": [{"degree": d, "unit_ps": model.transfer_ps(b)} for d, b in A100_CLUSTER.bandwidths],
    }
    beside = [{"name": "encoder", "kind": "encoder", "dp": 16}, {"name": "generator", "kind": "generator", "dp": 8}]
    stream = {
        "datasets": [{"name": "wikipedia", "fingerprint": "0" * 64}],
        "tokenizer": {"name": "any", "digest": "0" * 64, "vocab_size": 1, **ids},
        "seq_len": 384_000,
        "global_batch": BATCH,
        "packing": {"enabled": False},
        "generation": {"ratio": "0.3" if images else "0"},
    }
    modules = [backbone, *(beside if images else [])]
    execution = {"modules": modules, "layout": layout, "end": {"steps": NUM_BATCHES}}
    return parse_job({"stream": stream, "execution": execution})


def _samples(lengths: I64, seed: int, images: bool) -> StepSamples:
    """Samples of so many tokens, with an image of up to 900 patches each or with none."""
    count, rng = len(lengths), np.random.default_rng(seed)
    rows, columns = (2 * rng.integers(1, 16, count if images else 0).astype(np.int32) for _ in range(2))
    tokens = np.maximum(lengths, 256) if images else lengths
    task = np.where(images & (rng.random(count) < 0.3), Task.GENERATION, Task.UNDERSTANDING)
    zeros = np.zeros(count, np.int64)
    return StepSamples(
        dataset=zeros.astype(np.int32),
        epoch=zeros,
        sample=np.arange(count, dtype=np.uint64),
        task=task.astype(np.int32),
        text_tokens=tokens,
        truncated_tokens=zeros,
        tokens=tokens,
        image_offsets=np.arange(count + 1) if images else np.zeros(count + 1, np.int64),
        image_rows=rows,
        image_columns=columns,
    )
