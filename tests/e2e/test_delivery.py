"""What a whole job delivers through a real server: every sample once per epoch, and views of the same samples."""

import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.server_process import run
from e2e.streams import View, dataset_flags, read_views, start_servers
from serving.harness import index
from shards import write_interleaved, write_pairs, write_texts

from dataserver.dataset import Dataset
from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving.config import load_config
from trainclient.client import Batch

Sample = tuple[int, int, int]
"""Dataset, epoch, number."""
Image = tuple[Sample, int]

ENCODER, BACKBONE, GENERATOR = "vit", "llm", "gen"
IGNORED = -100
FIRST_SPECIAL_TOKEN = 256
"""Of the byte tokenizer."""


@dataclass(frozen=True)
class Case:
    """One job over the datasets of this module."""

    datasets: tuple[str, ...]
    degrees: Mapping[str, int]
    batch: int
    microbatch: int = 1
    packed: bool = False
    epochs: int = 1
    ratio: str = "0.4"
    weights: tuple[str, ...] = ()
    stream: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        """The job as a user writes it."""
        kinds = {ENCODER: "encoder", BACKBONE: "backbone", GENERATOR: "generator"}
        weights = self.weights or ("1",) * len(self.datasets)
        return {
            "stream": {
                "datasets": [{"name": n, "weight": w} for n, w in zip(self.datasets, weights, strict=True)],
                "sizing": {"max_patches": 64},
                "seq_len": 640,
                "packing": {"enabled": self.packed},
                "global_batch": self.batch,
                "generation": {"ratio": self.ratio, "query_tokens": 8},
                "shuffle_window": 2,
                **self.stream,
            },
            "execution": {
                "modules": [{"name": name, "kind": kinds[name], "dp": dp} for name, dp in self.degrees.items()],
                "microbatch": self.microbatch,
                "end": {"epochs": self.epochs},
            },
        }


CASES = {
    "one rank": Case(("pairs",), {ENCODER: 1, BACKBONE: 1, GENERATOR: 1}, batch=5),
    "three ranks": Case(("pairs",), {ENCODER: 2, BACKBONE: 3, GENERATOR: 2}, batch=9, epochs=2),
    "packed": Case(("pairs",), {ENCODER: 1, BACKBONE: 3, GENERATOR: 1}, batch=6, microbatch=2, packed=True),
    "more encoders than backbones": Case(("pairs",), {ENCODER: 3, BACKBONE: 1, GENERATOR: 2}, batch=4, packed=True),
    "generation only": Case(("pairs",), {BACKBONE: 2, GENERATOR: 1}, batch=4, ratio="1"),
    "understanding only": Case(("pairs",), {ENCODER: 1, BACKBONE: 2}, batch=8, ratio="0", microbatch=4),
    "documents": Case(("docs",), {ENCODER: 2, BACKBONE: 2}, batch=4, ratio="0"),
    "documents packed": Case(("docs",), {ENCODER: 1, BACKBONE: 2}, batch=2, ratio="0", packed=True, epochs=2),
    "texts": Case(("texts",), {BACKBONE: 2}, batch=6, ratio="0"),
    "texts packed": Case(("texts",), {BACKBONE: 4}, batch=4, ratio="0", packed=True, epochs=3),
    "mixture": Case(("pairs", "docs"), {ENCODER: 1, BACKBONE: 2, GENERATOR: 1}, batch=8, weights=("1", "2")),
    "mixture packed": Case(
        ("texts", "docs", "pairs"),
        {ENCODER: 2, BACKBONE: 2, GENERATOR: 1},
        batch=6,
        packed=True,
        weights=("1", "1", "3"),
    ),
}


@dataclass(frozen=True)
class Delivered:
    """What one microbatch of one rank says."""

    step: int
    position: tuple[int, int]
    plan: tuple[object, ...]
    samples: list[Sample]
    images: list[Image]
    generated: list[bool]
    targets: int
    """Tokens or patches that are a target of this module's loss."""
    texts: list[bytes]
    """Of each sample, through the byte tokenizer."""


def summarize(batch: Batch) -> Delivered:
    """Read a view without any help of the planner."""
    items, tensors = batch.items, {name: t.numpy() for name, t in batch.tensors.items()}
    assert not items.invalid.any()
    samples = list(zip(items.dataset.tolist(), items.epoch.tolist(), items.sample.tolist(), strict=True))
    images = list(zip(samples, items.image.tolist(), strict=True)) if "patches" in tensors else []
    generated, texts, targets = [], [], 0
    if "token_ids" in tensors:
        slots = tensors["condition_slots"]
        for first, end in pairwise(tensors["cu_lengths"].tolist()):
            generated.append(bool(((slots >= first) & (slots < end)).any()))
            tokens = tensors["token_ids"][first:end]
            texts.append(tokens[tokens < FIRST_SPECIAL_TOKEN].astype(np.uint8).tobytes())
        targets = int((tensors["labels"] != IGNORED).sum())
    elif "loss_mask" in tensors:
        targets = int(tensors["grid"].prod(axis=1).sum())
    plan = (batch.plan_hash, batch.num_microbatches, batch.text_tokens, batch.target_patches)
    return Delivered(batch.step, (batch.step, batch.microbatch), plan, samples, images, generated, targets, texts)


def deliver(job: Job, flags: list[str]) -> dict[View, list[Delivered]]:
    """Everything that a server sends to all ranks of all modules."""
    with ExitStack() as stack:
        return read_views([*start_servers(stack, flags, 1)], job, summarize)


def of_kind(delivered: Mapping[View, list[Delivered]], module: str) -> list[Delivered]:
    return [one for (name, _), found in delivered.items() if name == module for one in found]


def assert_once_per_epoch(delivered: Mapping[View, list[Delivered]], datasets: list[Dataset], epochs: int) -> None:
    """No sample twice in an epoch, all of them in each complete epoch."""
    counts = Counter(sample for one in of_kind(delivered, BACKBONE) for sample in one.samples)
    assert set(counts.values()) == {1}
    for number, dataset in enumerate(datasets):
        everything = {s << 32 | row for s, shard in enumerate(dataset.shards) for row in range(shard.num_samples)}
        for epoch in range(epochs):
            assert {sample for d, p, sample in counts if (d, p) == (number, epoch)} == everything
        assert {sample for d, _, sample in counts if d == number} == everything, "there are no other samples"


def assert_views_agree(delivered: Mapping[View, list[Delivered]], datasets: list[Dataset]) -> None:
    """One plan per step in all views; encoder and generator have the images of the backbone's samples by task."""
    positions = {tuple(one.position for one in found) for found in delivered.values()}
    assert len(positions) == 1, "waves differ between ranks"
    sizes = [[np.diff(shard.sizes().image_offsets) for shard in dataset.shards] for dataset in datasets]
    for step in {one.step for found in delivered.values() for one in found}:
        ours = {view: [one for one in found if one.step == step] for view, found in delivered.items()}
        ((_, num_microbatches, text_tokens, target_patches),) = {o.plan for found in ours.values() for o in found}
        assert all(len(found) == num_microbatches for found in ours.values())
        wanted: dict[bool, list[Image]] = {True: [], False: []}
        for one in of_kind(ours, BACKBONE):
            for sample, generated in zip(one.samples, one.generated, strict=True):
                dataset, _, number = sample
                count = int(sizes[dataset][number >> 32][number & 0xFFFFFFFF])
                wanted[generated] += [(sample, i) for i in range(count)]
        assert sorted(image for one in of_kind(ours, ENCODER) for image in one.images) == sorted(wanted[False])
        assert sorted(image for one in of_kind(ours, GENERATOR) for image in one.images) == sorted(wanted[True])
        assert sum(one.targets for one in of_kind(ours, BACKBONE)) == text_tokens
        assert sum(one.targets for one in of_kind(ours, GENERATOR)) == target_patches


def fill(case: Case, folders: Mapping[str, Path], index_dirs: Mapping[str, Path] | None = None) -> Job:
    config = load_config(None, {"datasets": folders, "index_dirs": index_dirs or {}})
    return parse_job(fill_job(case.data, Catalog.open(config)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("delivery")
    return {
        "pairs": index(write_pairs(root / "pairs", 37, 8, seed=4)),
        "docs": index(write_interleaved(root / "docs", 21, 6, seed=5)),
        "texts": index(write_texts(root / "texts", 40, 16, seed=6)),
    }


@pytest.fixture(scope="module")
def address(folders: dict[str, Path]) -> Iterator[str]:
    with ExitStack() as stack:
        (address,) = start_servers(stack, dataset_flags(folders), 1)
        yield address


@pytest.mark.parametrize("name", CASES)
def test_each_sample_once_per_pass_and_the_same_in_all_views(name: str, folders: dict[str, Path], address: str) -> None:
    case = CASES[name]
    delivered = read_views([address], fill(case, folders), summarize)
    datasets = [Dataset.open(folders[n]) for n in case.datasets]
    assert_once_per_epoch(delivered, datasets, case.epochs)
    assert_views_agree(delivered, datasets)
    if not case.packed:
        sizes = Counter[int]()
        for one in of_kind(delivered, BACKBONE):
            sizes[one.step] += len(one.samples)
        *whole, last = (sizes[step] for step in sorted(sizes))
        assert set(whole) == {case.batch}
        assert 0 < last <= case.batch


def test_texts_are_those_of_the_tar(folders: dict[str, Path], address: str) -> None:
    case = Case(("pairs",), {ENCODER: 1, BACKBONE: 2, GENERATOR: 1}, batch=6, stream={"seq_len": 4096})
    delivered = read_views([address], fill(case, folders), summarize)
    found = {
        n: text for one in of_kind(delivered, BACKBONE) for (_, _, n), text in zip(one.samples, one.texts, strict=True)
    }
    expected = {}
    for shard, path in enumerate(sorted(folders["pairs"].glob("*.tar"))):
        with tarfile.open(path) as tar:
            captions = [m for m in tar.getmembers() if m.name.endswith(".txt")]
            expected |= {shard << 32 | row: tar.extractfile(m).read() for row, m in enumerate(captions)}  # type: ignore[union-attr]
    assert found == expected


@pytest.mark.parametrize(
    ("dataset", "case", "num_samples", "num_images"),
    [
        (
            "interleaved-mini",
            Case(("mini",), {ENCODER: 2, BACKBONE: 2}, batch=8, ratio="0", packed=True, stream={"seq_len": 4096}),
            300,
            866,
        ),
        pytest.param(
            "laion-mini",
            Case(("mini",), {ENCODER: 1, BACKBONE: 2, GENERATOR: 1}, batch=32, microbatch=4),
            1760,
            1760,
            marks=pytest.mark.long,
        ),
    ],
)
def test_real_photographs_whole(
    shared_data: Path, tmp_path: Path, dataset: str, case: Case, num_samples: int, num_images: int
) -> None:
    folder = shared_data / dataset
    assert run("index", folder, "--index-dir", tmp_path).returncode == 0
    job = fill(case, {"mini": folder}, {"mini": tmp_path})
    delivered = deliver(job, [*dataset_flags({"mini": folder}), "--index-dir", f"mini={tmp_path}"])
    datasets = [Dataset.open(folder, tmp_path)]
    assert_once_per_epoch(delivered, datasets, 1)
    assert_views_agree(delivered, datasets)
    assert sum(len(one.samples) for one in of_kind(delivered, BACKBONE)) == num_samples
    assert sum(len(one.images) for found in delivered.values() for one in found) == num_images
