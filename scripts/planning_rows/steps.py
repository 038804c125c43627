"""Rows of whole plans: step time over its bound on real sizes, planning time, and how it grows with the step."""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row

from dataserver.assembly import load_tokenizer
from dataserver.dataset import Dataset, build_index, count_tokens
from dataserver.planning.job.fields import SPECIAL_TOKENS
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.pipelined.placing import lower_bound_ns
from dataserver.planning.layouts.pipelined.planner import planned_problem
from dataserver.planning.planner import ablation, plan_step, timeline
from dataserver.planning.stream.grids import patch_grids
from dataserver.planning.stream.samples import StepSamples, Task
from dataserver.planning.stream.sizing import draw_tasks
from dataserver.reporting.ablation import mean_ablation

SEQ_LEN = 8192
Sizes = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Text tokens, widths and heights of samples."""
PLANNERS: dict[str, dict[str, Any]] = {
    "default policies": {},
    "as few microbatches as samples need": {"fewest": True},
    "best-fit packing": {"packing": "best_fit"},
    "best-fit packing, Alg. 1 + 2": {"packing": "best_fit", "order": "disttrain"},
}


def make_job(
    dp: int,
    batch: int,
    images_dp: int,
    *,
    stages: int = 8,
    seq_len: int = SEQ_LEN,
    packing: str = "balanced",
    order: str = "search",
    balance: str = "lpt",
    packed: bool = True,
    memory: int | None = None,
    fewest: bool | None = None,
) -> Job:
    """ViT-H, Llama 7B and a 1B generator, each with memory for so many patches or tokens."""
    common = {"balance": balance} | ({} if memory is None else {"memory": {"budget_bytes": memory, "unit_bytes": 1}})
    tokenizer = dict.fromkeys(SPECIAL_TOKENS, 0)
    return parse_job(
        {
            "stream": {
                "datasets": [{"name": "laion", "fingerprint": "0" * 64}],
                "tokenizer": {"name": "any", "digest": "0" * 64, "vocab_size": 1, **tokenizer},
                "seq_len": seq_len,
                "global_batch": batch,
                "packing": {"enabled": packed},
                "generation": {"ratio": "0.5"},
            },
            "execution": {
                "modules": [
                    {"name": "encoder", "kind": "encoder", "dp": images_dp, **common},
                    {"name": "backbone", "kind": "backbone", "dp": dp, "pp": stages, "packing": packing, **common},
                    {"name": "generator", "kind": "generator", "dp": images_dp, **common},
                ],
                "layout": {"kind": "pipelined", "order": order, "fewest_microbatches": fewest},
                "end": {"steps": 1},
            },
        }
    )


def laion_sizes(folder: Path) -> Sizes:
    """Caption tokens (bytes), widths and heights of all samples of an img2dataset folder."""
    with tempfile.TemporaryDirectory() as index:
        build_index(folder, Path(index))
        tokenizer = load_tokenizer("bytes")
        count_tokens(folder, tokenizer, Path(index))
        shards = Dataset.open(folder, Path(index)).shards
        sizes = [s.sizes() for s in shards]
        tokens = np.concatenate([s.tokens.counts(tokenizer.digest) for s in shards])
        return tokens, np.concatenate([s.image_width for s in sizes]), np.concatenate([s.image_height for s in sizes])


def resampled(job: Job, sizes: Sizes, count: int, seed: int) -> StepSamples:
    """A step of `count` image-text pairs whose sizes are drawn from given ones."""
    picked = np.random.default_rng(seed).integers(0, len(sizes[0]), count)
    tokens, widths, heights = (s[picked] for s in sizes)
    rows, columns = patch_grids(widths, heights, job.stream.sizing)
    sample = np.arange(count, dtype=np.uint64)
    task = draw_tasks(job.stream, 0, seed, sample, np.ones(count, np.bool_))
    text = tokens.astype(np.int64)
    patches = rows.astype(np.int64) * columns
    fixed = np.where(task == Task.GENERATION, 2 + job.stream.generation.query_tokens, 4 + patches // 4)
    zeros = np.zeros(count, np.int64)
    offsets = np.arange(count + 1, dtype=np.int64)
    return StepSamples(zeros.astype(np.int32), zeros, sample, task, text, zeros, fixed + text, offsets, rows, columns)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Packed steps of real sizes."""

    name: str
    dp: int
    stages: int
    seq_len: int
    samples: int
    seeds: range
    power: float
    """Widths and heights are raised to it, around their median: the skew."""


B = Scenario("scenario B", 16, 8, 8_192, 1_920, range(20), 1.0)
HELD_OUT = Scenario("its held-out variant", 12, 6, 4_096, 1_000, range(100, 120), 0.7)


def scenario_b(folder: Path) -> list[Row]:
    """Real sizes in sequences of 8,192 tokens on 16 ranks of 8 stages, as many as 97 % fill takes; and held out.

    The target's bound is that of scenario A, where a sequence passes one encoder rank. A plan may spread its images
    over all ranks, which no bound this high is proven for: the second row has one that is. Bounds are of as many
    microbatches as plans choose: of more of them they are lower and further from what pipelines reach.
    """
    sizes = laion_sizes(folder)
    return [row for scenario in (B, HELD_OUT) for row in _scenario(scenario, sizes)]


def _scenario(scenario: Scenario, sizes: Sizes) -> list[Row]:
    tokens, *sides = sizes
    skewed = [(np.median(s) * (s / np.median(s)) ** scenario.power).astype(np.int32) for s in sides]
    shape: dict[str, Any] = {"stages": scenario.stages, "seq_len": scenario.seq_len}
    dp = scenario.dp
    times: dict[str, list[int]] = {name: [] for name in PLANNERS}
    ratios: list[float] = []
    proven: list[float] = []
    ablations = []
    for seed in scenario.seeds:
        samples = resampled(make_job(dp, dp, dp, **shape), (tokens, *skewed), scenario.samples, seed)
        batch = dp * -(-int(samples.tokens.sum()) * 100 // (97 * scenario.seq_len * dp))
        for name, policies in PLANNERS.items():
            job = make_job(dp, batch, dp, **shape, **policies)
            plan = plan_step(job, seed, samples)
            makespan = timeline(job.spec, plan).makespan_ns
            times[name].append(makespan)
            if name == "default policies":
                problem = planned_problem(job, plan)
                within = replace(problem, way=np.maximum(problem.way, problem.work))  # images stay in their component
                ratios.append(makespan / lower_bound_ns(within))
                proven.append(makespan / lower_bound_ns(problem))
                ablations.append(ablation(job, plan))
    found = []
    for name in PLANNERS:
        if name == "default policies":
            text = f"{median(ratios):.4f} x bound, worst {max(ratios):.4f}"
            name = f"{scenario.name}, default policies, bound as in scenario A"
            found.append(Row(name, text, "median <= 1.03", median(ratios) <= 1.03))
            text = f"{median(proven):.4f} x bound, worst {max(proven):.4f}"
            found.append(Row("  the same, bound that holds for images spread over any ranks too", text, "", None))
            continue
        gain = median(t / o for t, o in zip(times[name], times["default policies"], strict=True))
        found.append(Row(f"  against {name}", f"{gain:.3f} x as fast", "", None))
    for row in mean_ablation(ablations):
        name, ms, before, first = row.cells
        found.append(Row(f"  {name}", f"{ms} ms, {before} of the one before, {first} of the first", "", None))
    return found


def planning_time() -> list[Row]:
    """Scaled CPU time of a whole warm plan on one core."""
    limits = 250, 250 * 1_200 // 1_920
    return [
        *_planning_time(1_920, 128, 32, 8, 0.6, range(20), limits[0]),
        *_planning_time(1_200, 80, 40, 6, 0.9, range(100, 120), limits[1]),
        _growth(0.6, 8, range(5)),
        _growth(0.9, 12, range(100, 105)),
    ]


def drawn_sizes(sigma: float) -> Sizes:
    """Log-normal ones, whose widths and heights have this sigma."""
    rng = np.random.default_rng(0)
    return (
        np.exp(rng.normal(4, 1, 4096)).astype(np.int64) + 1,
        np.exp(rng.normal(6.24, sigma, 4096)).astype(np.int32),
        np.exp(rng.normal(6.0, sigma, 4096)).astype(np.int32),
    )


def _planning_time(
    count: int, dp: int, images_dp: int, stages: int, sigma: float, seeds: Iterable[int], limit_ms: int
) -> list[Row]:
    """One plan of `count` sequences, with endless memory and with little."""
    sizes, found = drawn_sizes(sigma), []
    title = f"a plan: {count:,} sequences on {dp} ranks x {stages} stages, sigma {sigma}"
    for memory, limit in ((None, limit_ms), (12_000, 4 * limit_ms)):
        job = make_job(dp=dp, batch=count, images_dp=images_dp, stages=stages, packed=False, memory=memory)
        steps = [resampled(job, sizes, count, seed) for seed in seeds]
        times = [_milliseconds(job, samples) for samples in steps]
        name = title
        if memory is not None:  # stages cannot hold what 1F1B asks for, so that every change has to keep within it
            held = [int(plan_step(job, 0, samples).in_flight("backbone")[0]) for samples in steps[:5]]
            wanted = f"the {stages + 1} that 1F1B asks for"
            name = f"  with memory for {memory:,} units: {min(held)} to {max(held)} in flight of {wanted}"
        text = f"{median(times):.0f} ms, worst {max(times):.0f} ms"
        found.append(Row(name, text, f"< {limit} ms", max(times) < limit))
    return found


def _growth(sigma: float, dp: int, seeds: Sequence[int]) -> Row:
    """Time for each sample of steps of 1,000 to 64,000; a ratio, which needs no scale, from times that have one."""
    sizes, per_sample = drawn_sizes(sigma), {}
    for count in (1_000, 4_000, 16_000, 64_000):
        job = make_job(dp=dp, batch=max(dp, count // 20 // dp * dp), images_dp=dp)
        per_sample[count] = median(_milliseconds(job, resampled(job, sizes, count, seed)) for seed in seeds) / count
    spread = max(per_sample.values()) / min(per_sample.values())
    text = ", ".join(f"{count:,}: {ms * 1e3:.0f} us" for count, ms in per_sample.items())
    name = f"planning time for each sample of a step, {dp} ranks, sigma {sigma}"
    return Row(name, f"{text}; {spread:.2f} x", "within 1.5 x", spread <= 1.5)


def _milliseconds(job: Job, samples: StepSamples) -> float:
    """Scaled CPU time of a plan, the kernels loaded."""
    plan_step(job, 0, samples)
    return timed(plan_step, job, 0, samples)[1]
