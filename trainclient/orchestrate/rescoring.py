"""Choices scored again by planner and simulator, on samples of the sizes that there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.job.fields import Modality
from dataserver.planning.job.identity import parse_job
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.item_sizes import has_timestamps
from dataserver.planning.stream.samples import AUDIO, IMAGE, MODALITY_NUMBERS, VIDEO, SampleSizes, StepSamples
from dataserver.planning.stream.sizing import size_samples
from dataserver.planning.stream.tiles import LAYOUT
from trainclient.orchestrate.choice import Choice, Problem
from trainclient.orchestrate.sample_sizes import SampleSize
from trainclient.orchestrate.workload import Stream, Workload

SEED: Final = 20_240_804


def stream_block(problem: Problem) -> dict[str, Any]:
    """A stream with the sizes of the problem, over a dataset that is nowhere."""
    stream = problem.workload.stream
    found: dict[str, Any] = {
        "datasets": [{"name": "sizes", "fingerprint": "0" * 64}],
        "tokenizer": {"name": "bytes", "digest": "0" * 64, "vocab_size": 262}
        | {name: 256 + n for n, name in enumerate(("bos", "eos", "boi", "eoi", "image", "query"))},
        "sizing": _sizing(problem.workload),
        "seq_len": stream.seq_len,
        "global_batch": stream.global_batch,
        "packing": {"enabled": stream.packed, "fill": f"{stream.fill:.6f}"},
        "generation": _generation(stream),
    }
    if stream.contrastive_batch is not None:
        found["contrastive_batch"] = stream.contrastive_batch
    return found


def _sizing(workload: Workload) -> dict[str, Any]:
    """By which samples were sized, or patches of a pixel, as many as the largest image has. Marks and timestamps are
    tokens without meaning here."""
    stream = workload.stream
    if stream.sizing is None:
        images = (i.rows for size in workload.sizes for i in stream.items(size) if i.modality is Modality.IMAGE)
        return {"patch": 1, "merge": stream.merge, "max_patches": max(images, default=stream.merge**2)}
    found = stream.sizing.model_dump(mode="json", exclude_none=True)
    if (marks := stream.sizing.marks) is not None:
        found["marks"] = {
            "alone": [0] * len(marks.alone),
            "row_end": [0] * len(marks.row_end),
            "whole": [0] * len(marks.whole),
            "tiles": [[[0] * len(ids) for ids in row] for row in marks.tiles],
        }
    if has_timestamps(stream.sizing):
        no_ids = {"digits": [0] * 10, "point": [], "after": []}
        found["video"]["timestamps"] = no_ids if stream.contrastive_batch is None else None  # towers see no videos
    return found


def _generation(stream: Stream) -> dict[str, Any]:
    found: dict[str, Any] = {"ratio": f"{stream.generation:.6f}", "query_tokens": stream.query_tokens}
    return {**found, "interleaved": True} if stream.interleaved else found


@dataclass(frozen=True, slots=True)
class Simulated:
    """What planner and simulator make of a choice, for each draw of samples."""

    times_ns: tuple[float, ...]
    """Steps, with the sums of gradients after them."""
    waves: tuple[int, ...]
    """Microbatches that each rank runs, one number for each draw."""

    @property
    def mean_ns(self) -> float:
        """Mean time over all draws, in nanoseconds."""
        return float(np.mean(self.times_ns))

    @property
    def spread_percent(self) -> float:
        """The slowest draw less the fastest one, in percent of the mean."""
        return 100 * (max(self.times_ns) - min(self.times_ns)) / self.mean_ns

    def plus(self, other: "Simulated") -> "Simulated":
        """Join the draws of two simulations of one choice."""
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
    table = _table(workload, [sizes[i] for i in chosen.tolist()])
    return size_samples(stream, 0, step, np.arange(number, dtype=np.uint64), table)


def _table(workload: Workload, sizes: Sequence[SampleSize]) -> SampleSizes:
    """The samples of one shard: an image is as high as a merged block, a frame of a video as well, with as many columns
    as its patches make; a clip has one row."""
    stream = workload.stream
    items = [item for size in sizes for item in stream.items(size)]
    rows, groups = (np.array(of, np.int64) for of in ([i.rows for i in items], [i.groups for i in items]))
    modality = np.array([MODALITY_NUMBERS[item.modality] for item in items], np.uint8)
    high = np.where(modality == AUDIO, 1, groups * stream.merge)
    offsets = np.concatenate([[0], np.cumsum([len(size.patches) for size in sizes])]).astype(np.int64)
    media: dict[str, NDArray[Any]] = {}
    if (modality != IMAGE).any():
        media["image_modality"] = modality
    if (modality == VIDEO).any():
        media["image_depths"] = groups.astype(np.int32)
    if stream.sizing is not None and stream.sizing.tiles is not None:
        layouts = [layout for size in sizes for layout in size.layouts]
        media["image_layout"] = np.array(layouts, np.int32).reshape(-1, LAYOUT)
    if stream.interleaved:
        media["image_texts"] = np.array([text for size in sizes for text in size.image_texts], np.int64)
    if stream.sizing is not None and has_timestamps(stream.sizing):
        tokens = np.array([item.tokens for item in items], np.int64)
        marks = np.where(modality == VIDEO, tokens - rows // stream.merge**2, 0)
        media["image_marks"] = marks.astype(np.int32)
    texts = np.array([size.text_tokens for size in sizes], np.int64)
    return SampleSizes(texts, offsets, high.astype(np.int32), (rows // high).astype(np.int32), **media)
