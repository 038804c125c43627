"""Choices scored again by planner and simulator, on samples of the sizes that there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dataserver.planning.job.identity import parse_job
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.samples import ShardTable, StepSamples
from dataserver.planning.stream.sizing import shard_table, size_samples
from trainclient.orchestrate.choice import Choice, Problem
from trainclient.orchestrate.workload import SampleSize, Workload

SEED: Final = 20_240_804


def stream_block(problem: Problem) -> dict[str, Any]:
    """A stream with the sizes of the problem, over a dataset that is nowhere."""
    stream = problem.workload.stream
    most = max((p for s in problem.workload.sizes for p in s.patches), default=stream.merge**2)
    found: dict[str, Any] = {
        "datasets": [{"name": "sizes", "fingerprint": "0" * 64}],
        "tokenizer": {"name": "bytes", "digest": "0" * 64, "vocab_size": 262}
        | {name: 256 + n for n, name in enumerate(("bos", "eos", "boi", "eoi", "image", "query"))},
        "sizing": {"patch": 1, "merge": stream.merge, "max_patches": most},
        "seq_len": stream.seq_len,
        "global_batch": stream.global_batch,
        "packing": {"enabled": stream.packed, "fill": f"{stream.fill:.6f}"},
        "generation": {"ratio": f"{stream.generation:.6f}", "query_tokens": stream.query_tokens},
    }
    if stream.contrastive_batch is not None:
        found["contrastive_batch"] = stream.contrastive_batch
    return found


@dataclass(frozen=True, slots=True)
class Simulated:
    """What planner and simulator make of a choice, for each draw of samples."""

    times_ns: tuple[float, ...]
    """Steps, with the sums of gradients after them."""
    waves: tuple[int, ...]
    """Microbatches that each rank runs, one number for each draw."""

    @property
    def mean_ns(self) -> float:
        """Mean of all draws."""
        return float(np.mean(self.times_ns))

    @property
    def spread_percent(self) -> float:
        """The slowest draw less the fastest one, in percent of the mean."""
        return 100 * (max(self.times_ns) - min(self.times_ns)) / self.mean_ns

    def plus(self, other: "Simulated") -> "Simulated":
        """The draws of both."""
        return Simulated(self.times_ns + other.times_ns, self.waves + other.waves)


def simulate(problem: Problem, choice: Choice, block: Mapping[str, Any], draws: Sequence[int]) -> Simulated:
    """Steps as they would be planned and are simulated, each of the samples that its number draws.

    Raises:
        ValueError: the job cannot be planned; says why.
    """
    job = parse_job({"stream": stream_block(problem), "execution": dict(block)})
    times, waves = [], []
    for step in draws:
        plan = plan_step(job, step, drawn_samples(problem.workload, job.spec.stream, step))
        times.append(timeline(job.spec, plan).makespan_ns + choice.parts.get("gradients", 0.0))
        waves.append(plan.num_microbatches)
    return Simulated(tuple(times), tuple(waves))


def drawn_samples(workload: Workload, stream: Any, step: int) -> StepSamples:
    """Samples of a step, drawn by their counts."""
    each, sizes = workload.samples_per_sequence, workload.sizes
    number = max(1, int(workload.stream.global_batch * each))
    weights = np.array([s.count for s in sizes], np.float64)
    chosen = np.random.default_rng((SEED, step)).choice(len(sizes), number, p=weights / weights.sum())
    table = _table([sizes[i] for i in chosen.tolist()], stream)
    return size_samples(stream, 0, step, np.arange(number, dtype=np.uint64), table)


def _table(sizes: Sequence[SampleSize], stream: Any) -> ShardTable:
    """The samples of one shard; images are strips as high as a merged block, of so many patches. Where images are cut,
    what their tokens are more, or less, than blocks of patches is text."""
    counts = np.array([len(s.patches) for s in sizes], np.int64)
    patches = np.array([p for s in sizes for p in s.patches], np.int64)
    merge, number = stream.sizing.merge, len(sizes)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    more = (sum(s.tokens_of_images(merge)) - sum(p // merge**2 for p in s.patches) for s in sizes)
    texts = np.array([max(0, s.text_tokens + n) for s, n in zip(sizes, more, strict=True)], np.int64)
    sides = np.full(len(patches), merge, np.int32)
    return shard_table(stream, np.arange(number), texts, offsets, (patches // merge).astype(np.int32), sides, "sizes")
