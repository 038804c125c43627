"""Rows of steps whose samples have an image, a clip or a video each: beside steps of images alone."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row

from dataserver.planning.job.fields import SPECIAL_TOKENS
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.planner import ablation, plan_step, timeline
from dataserver.planning.stream.item_sizes import VideoLengths
from dataserver.planning.stream.samples import AUDIO, VIDEO, StepSamples
from dataserver.planning.stream.sizing import shard_table, size_samples

MODALITIES = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class Case:
    """Unpacked steps of one size and skew."""

    layout: str
    ranks: int
    """Ranks of the backbone; in the colocated layout of all modules."""
    encoder_ranks: int
    stages: int
    samples: int
    sigma: float
    """Standard deviation of the logarithms of sides of images, and of lengths of texts, clips and videos."""
    limit_ms: int
    seeds: range


CASES = (
    Case("pipelined", 128, 32, 8, 1_920, 0.6, 250, range(20)),
    Case("pipelined", 80, 40, 6, 1_200, 0.9, 156, range(100, 120)),
    Case("colocated", 128, 128, 1, 1_920, 0.6, 250, range(20)),
    Case("colocated", 96, 96, 1, 960, 0.9, 250, range(100, 120)),
)
"""One of each layout, and its held-out variant."""


def rows() -> list[Row]:
    """All rows of this part; takes about two minutes."""
    return [row for case in CASES for row in _rows(case)]


def make_job(case: Case, modalities: tuple[str, ...]) -> Job:
    """An encoder of each modality beside a backbone, all with the costs of their kind."""
    ids = dict.fromkeys(SPECIAL_TOKENS, 0)
    sizing: dict[str, Any] = {"max_patches": 1024}
    sizing |= {name: {} for name in modalities if name == "audio"}
    sizing |= {name: {"max_frames": 32, "max_pixels": 256 * 28**2} for name in modalities if name == "video"}
    modules: list[dict[str, Any]] = [
        {"name": name, "kind": "encoder", "modality": name, "dp": case.encoder_ranks} for name in modalities
    ]
    modules.append({"name": "backbone", "kind": "backbone", "dp": case.ranks, "pp": case.stages})
    return parse_job(
        {
            "stream": {
                "datasets": [{"name": "drawn", "fingerprint": "0" * 64}],
                "tokenizer": {"name": "any", "digest": "0" * 64, "vocab_size": 1, **ids},
                "sizing": sizing,
                "seq_len": 8192,
                "global_batch": case.samples,
                "packing": {"enabled": False},
            },
            "execution": {
                "modules": modules,
                "layout": {"kind": case.layout},
                "microbatch": 1 if case.layout == "pipelined" else case.samples // case.ranks,
                "end": {"steps": 1},
            },
        }
    )


def make_samples(case: Case, job: Job, seed: int, count: int) -> StepSamples:
    """A text and one item each; of `count` modalities in turn. Clips are around 6 seconds, videos around 8."""
    draw, items = np.random.default_rng([seed, case.ranks]), np.arange(case.samples)
    modality = (items % count).astype(np.uint8)
    spread = draw.lognormal(0, case.sigma, (4, case.samples))
    widths, heights = (np.clip(400 * sides, 28, 4_000).astype(np.int32) for sides in spread[:2])
    seconds = np.clip(spread[2] * np.where(modality == AUDIO, 6, 8), 0.2, 600)
    widths[modality == AUDIO] = (seconds * 16_000).astype(np.int32)[modality == AUDIO]
    heights[modality == AUDIO] = 16_000
    length = np.where(modality == VIDEO, seconds, 0)
    lengths = VideoLengths((length * 30).astype(np.int32), (length * 1e6).astype(np.int64))
    texts = np.clip(50 * spread[3], 1, 2_000).astype(np.int64)
    what = {"modality": modality, "lengths": lengths} if count > 1 else {}
    table = shard_table(job.stream, items, texts, np.arange(case.samples + 1), widths, heights, **what)  # type: ignore[arg-type]
    return size_samples(job.stream, 0, seed, items.astype(np.uint64), table)


def _rows(case: Case) -> list[Row]:
    times: dict[int, list[float]] = {1: [], len(MODALITIES): []}
    ratios, gains = list[float](), list[float]()
    for seed in case.seeds:
        for count, spent in times.items():
            job = make_job(case, MODALITIES[:count])
            samples = make_samples(case, job, seed, count)
            if seed == case.seeds[0]:  # loads kernels
                plan_step(job, seed, samples)
            plan, ms = timed(plan_step, job, seed, samples)
            spent.append(ms)
        made = ablation(job, plan)
        gains.append((made[0].makespan_ns or 0) / (made[-1].makespan_ns or 1))
        ratios.append(timeline(job.spec, plan).makespan_ns / layout_of(job.spec.execution).lower_bound_ns(job, plan))
    name = f"{case.layout}, {case.samples:,} sequences on {case.ranks} ranks x {case.stages} stages"
    images, media = (median(spent) for spent in times.values())
    beside = median(m / i for i, m in zip(*times.values(), strict=True))
    return [
        Row(
            f"images, clips and videos, {name}",
            f"{median(ratios):.4f} x bound, worst {max(ratios):.4f}; {median(gains):.3f} x as fast as canonical order "
            f"(least {min(gains):.3f})",
            "never slower",
            min(gains) >= 1,
        ),
        Row(
            "  planning time",
            f"{media:.0f} ms, images alone {images:.0f}",
            f"< {case.limit_ms} ms",
            media < case.limit_ms,
        ),
        Row("  over that of images alone, with two encoders fewer", f"{beside:.2f} x", "", None),
    ]
