"""Views of videos whose frames have their times before them: tokens and positions, counted by hand."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from assembly.test_prepared_views import Run, tensors_of
from video.datasets import write_videos
from video.jobs import video_job

from dataserver.assembly import load_tokenizer
from dataserver.dataset import Dataset, DocumentParts
from dataserver.jobs import Catalog, JobPlanner, fill_job
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.stream.samples import ROW_BITS, VIDEO

pytest.importorskip("av", reason="the extra video is not installed")
RATE = 10
"""Frames a second of the videos of the tests."""
TIMESTAMPS = {"before": [60], "digits": [*range(48, 58)], "point": [46], "after": [115, 62, 258], "end": [259]}
RULE = {"rule": "qwen3", "fps": 5, "min_pixels": 784, "max_pixels": 12 * 28 * 28, "timestamps": TIMESTAMPS}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = write_videos(tmp_path_factory.mktemp("seen"))
    catalog = Catalog({"seen": Dataset.open(folder)}, {"bytes": load_tokenizer("bytes")})
    data = video_job(vit=1, eyes=1, llm=2, sizing={"max_patches": 64, "video": RULE}, seq_len=1024, global_batch=8)
    job = parse_job(fill_job(data, catalog))
    datasets = catalog.find_datasets(job.stream)
    return Run(job, list(datasets), JobPlanner(job, datasets))


def items_of(run: Run, plan: StepPlan, sample: int) -> Iterator[tuple[list[str], tuple[int, int]]]:
    """The images and videos of a sample: the times of its groups of frames, and their merge blocks; no time of an
    image."""
    samples = plan.samples
    shard, row = divmod(int(samples.sample[sample]), 1 << ROW_BITS)
    for number, item in enumerate(range(*samples.image_offsets[sample : sample + 2].tolist())):
        ref = run.datasets[0].shards[shard].image(row, number)
        depth = int(samples.image_depths[item])  # type: ignore[index]
        blocks = int(samples.image_rows[item]) // depth // 2, int(samples.image_columns[item]) // 2
        if ref.modality != VIDEO:
            yield [], blocks
            continue
        wanted = min(max(int(ref.frames / RATE * 5), 4), ref.frames)
        numbers = np.linspace(0, ref.frames - 1, wanted).round().astype(int).tolist()
        numbers += numbers[-1:] * (len(numbers) % 2)
        times = [(a / RATE + b / RATE) / 2 for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        assert len(times) == depth
        yield [f"{time:.1f}" for time in times], blocks


def by_hand(parts: DocumentParts, items: Iterator[tuple[list[str], tuple[int, int]]], ids: Any) -> np.ndarray:
    """Id and three positions of each token of a sample, int64 [T, 4]."""
    found: list[tuple[int, ...]] = []
    now = 0

    def add_text(*tokens: int) -> None:
        nonlocal now
        for token in tokens:
            found.append((token, now, now, now))
            now += 1

    def add_blocks(rows: int, columns: int) -> None:
        nonlocal now
        found.extend((ids.image, now, now + r, now + c) for r in range(rows) for c in range(columns))
        now += max(rows, columns)

    add_text(ids.bos)
    texts = iter(parts.texts)
    for kind in parts.kinds:
        if kind == 0:
            add_text(*next(texts).encode())
            continue
        times, blocks = next(items)
        add_text(ids.boi)
        for time in times:
            add_text(*f"<{time}s>".encode(), 258)
            add_blocks(*blocks)
            add_text(259)
        if not times:
            add_blocks(*blocks)
        add_text(ids.eoi)
    add_text(ids.eos)
    return np.array(found)


def test_tokens_and_positions_are_those_counted_by_hand(run: Run) -> None:
    names, ids = ["token_ids", "rotary_positions", "cu_lengths", "embedding_slots"], run.job.stream.tokenizer
    groups = 0
    for plan, view in run.views(ModuleKind.BACKBONE):
        tensors = tensors_of(run.prepare(plan, view, names))
        for at, sample in enumerate(view.items.tolist()):
            first, end = tensors["cu_lengths"][at : at + 2]
            shard, row = divmod(int(plan.samples.sample[sample]), 1 << ROW_BITS)
            items = list(items_of(run, plan, sample))
            groups += sum(len(times) for times, _ in items)
            expected = by_hand(run.datasets[0].shards[shard].parts(row), iter(items), ids)
            assert tensors["token_ids"][first:end].tolist() == expected[:, 0].tolist()
            assert np.array_equal(tensors["rotary_positions"][:, first:end], expected[:, 1:].T)
        assert (tensors["token_ids"][tensors["embedding_slots"]] == ids.image).all()
    assert groups > 20


def test_frames_are_those_whose_times_are_told(run: Run) -> None:
    """Every view of videos has as many groups as its backbone has times, and can be decoded."""
    groups = 0
    for plan, view in run.views(ModuleKind.ENCODER):
        if view.module != "eyes":
            continue
        prepared = run.prepare(plan, view)
        tensors = tensors_of(prepared)
        assert not prepared.num_invalid
        assert tensors["grid"][:, 0].tolist() == plan.samples.image_depths[view.items].tolist()  # type: ignore[index]
        groups += int(tensors["grid"][:, 0].sum())
    assert groups > 20
