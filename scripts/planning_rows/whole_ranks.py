"""What it costs that all ranks of a wave have images or none, and that images stay on the rank of their sequence.

Ranks that run encoder and backbone, half of the samples with an image; and held-out variants.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from benchmarks.rows import Row

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.parity import ranks_with_images
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import shard_table, size_samples

LONGEST_PERCENT, SLOWEST, ABOVE_PERCENT = 2, 1.05, 1
"""Targets: a step with parity over one without, planning it over planning the other, and a step over its bound."""


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one size and skew."""

    ranks: int
    stages: int
    microbatches: int
    sigma: float
    """Standard deviation of the logarithm of text lengths."""
    share: float
    """Share of the samples that have images."""
    seeds: range

    @property
    def name(self) -> str:
        """Describe the steps for people."""
        images = f"{self.share:.0%} with images"
        return f"{self.microbatches * self.ranks:,} sequences, {self.ranks} x {self.stages} ranks, {images}"


CASES = Case(64, 1, 16, 0.6, 0.5, range(20)), Case(24, 4, 24, 0.9, 0.2, range(100, 120))
"""One, and its held-out variant."""


def rows() -> list[Row]:
    """All rows of this part; takes about a minute."""
    return [row for case in CASES for row in _rows(case)]


def _rows(case: Case) -> Iterator[Row]:
    found = [_step(case, seed) for seed in case.seeds]
    longer, slower, above, broken = (list(column) for column in zip(*found, strict=True))
    lost = f"{100 * median(longer):.2f} % longer (worst {100 * max(longer):.2f}), {sum(broken)} waves without it"
    fine = 100 * median(longer) <= LONGEST_PERCENT and not sum(broken)
    yield Row(f"{case.name}: parity", lost, f"<= {LONGEST_PERCENT} %, all waves", fine)
    time_ratio = median(slower)
    yield Row(f"{case.name}: planning with parity", f"{time_ratio:.3f} x", f"<= {SLOWEST} x", time_ratio <= SLOWEST)
    if case.stages == 1:
        over = 100 * median(above)
        yield Row(f"{case.name}: over the bound", f"{over:.2f} %", f"<= {ABOVE_PERCENT} %", over <= ABOVE_PERCENT)


def _step(case: Case, seed: int) -> tuple[float, float, float, int]:
    """How much longer with parity, how much slower to plan, how far above the bound, and waves without parity."""
    plain, even = (_job(case, parity) for parity in (None, True))
    samples = _samples(case, plain, seed)
    made = {job.job_id: _timed(job, seed, samples) for job in (plain, even, plain, even)}  # the first ones load kernels
    (without, without_ns), (asked, asked_ns) = made[plain.job_id], made[even.job_id]
    base, other = timeline(plain.spec, without).makespan_ns, timeline(even.spec, asked).makespan_ns
    bound = layout_of(even.spec.execution).lower_bound_ns(even, asked)
    ranks = ranks_with_images(even.spec.execution, asked)
    return other / base - 1, asked_ns / without_ns, other / bound - 1, int(((ranks > 0) & (ranks < case.ranks)).sum())


def _timed(job: Job, seed: int, samples: StepSamples) -> tuple[StepPlan, int]:
    started = time.thread_time_ns()
    return plan_step(job, seed, samples), time.thread_time_ns() - started


def _job(case: Case, parity: bool | None) -> Job:
    tokenizer: dict[str, Any] = dict.fromkeys(("bos", "eos", "boi", "eoi", "image", "query"), 0)
    return parse_job(
        {
            "stream": {
                "datasets": [{"name": "synthetic", "fingerprint": "0" * 64}],
                "tokenizer": {"name": "any", "digest": "0" * 64, "vocab_size": 1, **tokenizer},
                "seq_len": 8192,
                "global_batch": case.ranks * case.microbatches,
            },
            "execution": {
                "modules": [
                    {"name": "encoder", "kind": "encoder", "dp": case.ranks},
                    {"name": "backbone", "kind": "backbone", "dp": case.ranks, "pp": case.stages},
                ],
                "identity_routing": True,
                "modality_parity": parity,
                "end": {"steps": 1},
            },
        }
    )


def _samples(case: Case, job: Job, seed: int) -> StepSamples:
    """Texts of a log-normal length, about three to a sequence; a share of them with an image of 224 to 896 pixels."""
    rng, count = np.random.default_rng(seed), 3 * case.ranks * case.microbatches
    has = rng.random(count) < case.share
    sides = rng.integers(224, 897, (2, int(has.sum()))).astype(np.int32)
    texts = np.minimum(rng.lognormal(7, case.sigma, count), 6000).astype(np.int64)
    table = shard_table(job.stream, np.arange(count), texts, np.concatenate([[0], np.cumsum(has)]), *sides)
    return size_samples(job.stream, 0, seed, np.arange(count, dtype=np.uint64), table)
