"""What transfers between stages cost a step, and what a planner that knows them wins back.

2,048 sequences on 128 ranks of 8 stages beside encoders and a generator, and a held-out variant; every transfer takes
5 % of the forward of a mean microbatch on a stage.
"""

from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
from benchmarks.rows import Row

from dataserver.planning.costs.model import forward_ns
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import shard_table, size_samples

SHARE_PERCENT = 5


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one size and skew."""

    ranks: int
    stages: int
    microbatches: int
    sigma: float
    """Standard deviation of the logarithm of text lengths."""
    seeds: range


CASES = Case(128, 8, 16, 0.3, range(5)), Case(48, 6, 24, 0.8, range(100, 105))
"""One, and its held-out variant."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "1F1B": {},
    "1F1B, up to 2 more in flight": {"extra_in_flight": 2},
    "interleaved, 2 chunks": {"schedule": "interleaved", "chunks": 2},
}


def rows() -> list[Row]:
    """All rows of this part; takes about twenty seconds."""
    found = []
    for case, (name, layout) in product(CASES, LAYOUTS.items()):
        longer, unaware = zip(*(_longer(case, seed, layout) for seed in case.seeds), strict=True)
        measured = f"{_percent(longer)} longer; planned without knowing the transfers {_percent(unaware)}"
        step = f"{case.microbatches * case.ranks:,} sequences, {case.ranks} ranks x {case.stages} stages"
        found.append(Row(f"{step}, transfers of {SHARE_PERCENT} %: {name}", measured, "", None))
    return found


def _longer(case: Case, seed: int, layout: dict[str, Any]) -> tuple[float, float]:
    """Step time with transfers over that without: of the plan that knows them, and of the one that does not."""
    plain = _job(case, layout)
    samples = _samples(case, plain, seed)
    backbone = plain.spec.execution.backbone
    mean = int(forward_ns(backbone.cost, samples.tokens).sum()) // (case.ranks * case.microbatches * case.stages)
    timed = _job(case, layout, mean * SHARE_PERCENT // 100)
    unaware = plan_step(plain, seed, samples)
    without = timeline(plain.spec, unaware).makespan_ns
    known = timeline(timed.spec, plan_step(timed, seed, samples)).makespan_ns
    return known / without - 1, timeline(timed.spec, unaware).makespan_ns / without - 1


def _job(case: Case, layout: dict[str, Any], transfer_ns: int | None = None) -> Job:
    pairs = [("encoder", "backbone"), ("backbone", "backbone"), ("backbone", "generator")]
    transfer = {"latency_ns": transfer_ns, "bytes_per_ns": "1", "row_bytes": 0}
    transfers = [{"source": source, "target": target, **transfer} for source, target in pairs]
    tokenizer = dict.fromkeys(("bos", "eos", "boi", "eoi", "image", "query"), 0)
    return parse_job(
        {
            "stream": {
                "datasets": [{"name": "synthetic", "fingerprint": "0" * 64}],
                "tokenizer": {"name": "any", "digest": "0" * 64, "vocab_size": 1, **tokenizer},
                "seq_len": 8192,
                "global_batch": case.ranks * case.microbatches,
                "packing": {"enabled": False},
                "generation": {"ratio": "0.5"},
            },
            "execution": {
                "modules": [
                    {"name": "encoder", "kind": "encoder", "dp": case.ranks // 2},
                    {"name": "backbone", "kind": "backbone", "dp": case.ranks, "pp": case.stages},
                    {"name": "generator", "kind": "generator", "dp": case.ranks // 2},
                ],
                "layout": {"kind": "pipelined", **layout},
                **({} if transfer_ns is None else {"transfers": transfers}),
                "end": {"steps": 1},
            },
        }
    )


def _samples(case: Case, job: Job, seed: int) -> StepSamples:
    """Texts of a log-normal length, an image of 224 to 896 pixels a side with each."""
    rng, count = np.random.default_rng(seed), case.ranks * case.microbatches
    sides = rng.integers(224, 897, (2, count)).astype(np.int32)
    texts = np.minimum(rng.lognormal(7, case.sigma, count), 6000).astype(np.int64)
    table = shard_table(job.stream, np.arange(count), texts, np.arange(count + 1), *sides)
    return size_samples(job.stream, 0, seed, np.arange(count, dtype=np.uint64), table)


def _percent(shares: tuple[float, ...]) -> str:
    return f"{100 * median(shares):.1f} % (worst {100 * max(shares):.1f})"
