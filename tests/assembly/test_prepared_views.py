"""Views of real shards: layout, bytes, validity, determinism."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, cast

import numpy as np
import pytest
from images.pictures import decode
from shards import write_interleaved, write_pairs, write_texts

from dataserver.assembly import (
    ByteTokenizer,
    PreparedView,
    UnknownTensorError,
    Validity,
    decoding,
    prepare_view,
    tokenizer_spec,
    total_bytes,
    view_tensors,
)
from dataserver.dataset import Dataset, ImageRef, Shard, StaleIndexError, build_index, count_tokens
from dataserver.images import ImageShape
from dataserver.jobs import JobPlanner
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import ViewPlan, view_plan
from dataserver.planning.stream.samples import Task

TOKENIZER = ByteTokenizer()
NAMES = {
    ModuleKind.ENCODER: ["patches", "grid", "cu_patches"],
    ModuleKind.BACKBONE: [
        "token_ids",
        "labels",
        "position_ids",
        "cu_lengths",
        "cu_sequences",
        "embedding_slots",
        "condition_slots",
    ],
    ModuleKind.GENERATOR: ["patches", "grid", "cu_patches", "loss_mask", "condition_offsets"],
}


@dataclass
class Run:
    """A job over open datasets."""

    job: Job
    datasets: list[Dataset]
    planner: JobPlanner

    def views(self, kind: ModuleKind | None = None) -> Iterator[tuple[StepPlan, ViewPlan]]:
        for step in range(self.planner.num_steps):
            plan = self.planner.plan(step)
            for module in self.job.spec.execution.modules:
                for rank in range(module.dp):
                    for microbatch in range(plan.num_microbatches):
                        if kind in (None, module.kind):
                            yield plan, view_plan(self.job.spec, plan, module.name, rank, microbatch)

    def prepare(
        self, plan: StepPlan, view: ViewPlan, names: Collection[str] = (), *, filler: int = 0, threads: int = 1
    ) -> PreparedView:
        tensors = view_tensors(self.job.spec, plan, view, names)
        buffer = np.full(total_bytes(tensors), filler, np.uint8)
        prepared = prepare_view(self.job.spec, plan, view, self.datasets, tensors, buffer)
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(task) for task in reversed(prepared.tasks)]:
                future.result()
        prepared.finish()
        return prepared


SIZING = {"patch": 7, "merge": 2, "max_patches": 64}


def open_run(
    folders: list[Path], steps: int = 2, ratio: str = "0.5", sizing: Mapping[str, int | str] = MappingProxyType(SIZING)
) -> Run:
    for folder in folders:
        build_index(folder, workers=1)
        count_tokens(folder, TOKENIZER)
    datasets = [Dataset.open(folder) for folder in folders]
    job = parse_job(
        {
            "stream": {
                "datasets": [{"name": f"d{i}", "fingerprint": d.fingerprint} for i, d in enumerate(datasets)],
                "tokenizer": tokenizer_spec(TOKENIZER).model_dump(),
                "sizing": dict(sizing),
                "seq_len": 512,
                "global_batch": 8,
                "generation": {"ratio": ratio, "query_tokens": 4},
            },
            "execution": {
                "modules": [
                    {"name": "vit", "kind": "encoder", "dp": 2},
                    {"name": "llm", "kind": "backbone", "dp": 2},
                    {"name": "dit", "kind": "generator"},
                ],
                "microbatch": 2,
                "end": {"steps": steps},
            },
        }
    )
    return Run(job, datasets, JobPlanner(job, datasets))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Pairs in three formats, interleaved documents and text alone."""
    root = tmp_path_factory.mktemp("shards")
    return open_run(
        [
            write_pairs(root / "pairs", formats=("JPEG", "PNG", "WEBP")),
            write_interleaved(root / "documents"),
            write_texts(root / "texts"),
        ]
    )


def tensors_of(prepared: PreparedView) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.of(prepared.buffer) for tensor in prepared.tensors}


def image_of(run: Run, plan: StepPlan, item: int) -> tuple[bytes, ImageShape, int]:
    """Bytes, shape and sample of one image of a step, the long way."""
    samples = plan.samples
    i = int(samples.image_sample[item])
    dataset = run.datasets[samples.dataset[i]]
    shard, row = int(samples.sample[i]) >> 32, int(samples.sample[i]) & 0xFFFFFFFF
    ref = dataset.shards[shard].image(row, item - int(samples.image_offsets[i]))
    rows, columns = int(samples.image_rows[item]), int(samples.image_columns[item])
    return dataset.read(ref), ImageShape(ref.width, ref.height, ref.orientation, rows, columns), i


def test_layout(run: Run) -> None:
    kinds = set()
    for plan, view in run.views():
        tensors = view_tensors(run.job.spec, plan, view)
        assert [t.name for t in tensors] == NAMES[view.kind]
        end = 0
        for tensor in tensors:
            # the next multiple of 64 after the end of the one before
            assert tensor.offset == (end + 63) // 64 * 64
            end = tensor.offset + int(np.prod(tensor.shape)) * (1 if tensor.dtype == np.uint8 else 4)
        assert total_bytes(tensors) == end
        kinds.add(view.kind)
    assert kinds == set(NAMES)


def test_image_views_hold_each_image_of_their_task_once(run: Run) -> None:
    seen: dict[ModuleKind, list[tuple[int, int]]] = {ModuleKind.ENCODER: [], ModuleKind.GENERATOR: []}
    expected: dict[ModuleKind, list[tuple[int, int]]] = {ModuleKind.ENCODER: [], ModuleKind.GENERATOR: []}
    for step in range(run.planner.num_steps):
        plan = run.planner.plan(step)
        for item, i in enumerate(plan.samples.image_sample):
            understood = plan.samples.task[i] == Task.UNDERSTANDING
            expected[ModuleKind.ENCODER if understood else ModuleKind.GENERATOR].append((step, item))
    for kind in seen:
        for plan, view in run.views(kind):
            check_image_view(run, plan, view)
            seen[kind] += [(plan.step, int(item)) for item in view.items]
        assert sorted(seen[kind]) == expected[kind]
        assert expected[kind]


def check_image_view(run: Run, plan: StepPlan, view: ViewPlan) -> None:
    prepared = run.prepare(plan, view)
    tensors = tensors_of(prepared)
    first = 0
    for n, item in enumerate(view.items):
        data, shape, _ = image_of(run, plan, int(item))
        valid, patches = decode(data, shape, run.job.stream.sizing)
        assert valid
        assert prepared.validity[n] == Validity.VALID
        assert tensors["grid"][n].tolist() == [shape.rows, shape.columns]
        assert tensors["cu_patches"][n] == first
        assert np.array_equal(tensors["patches"][first : first + len(patches)], patches)
        first += len(patches)
    assert tensors["cu_patches"][-1] == first == len(tensors["patches"])
    if view.kind is ModuleKind.GENERATOR:
        assert tensors["loss_mask"].tolist() == [1] * view.num_items
        assert tensors["condition_offsets"].tolist() == list(range(0, 4 * view.num_items + 1, 4))
        assert tensors["condition_offsets"][:-1].tolist() == view.starts.tolist()


def test_backbone_views_hold_the_texts(run: Run) -> None:
    num_texts = 0
    for plan, view in run.views(ModuleKind.BACKBONE):
        prepared = run.prepare(plan, view)
        tensors = tensors_of(prepared)
        has_images = np.diff(plan.samples.image_offsets)[view.items] > 0
        assert prepared.validity.tolist() == np.where(has_images, Validity.UNKNOWN, Validity.VALID).tolist()
        assert not prepared.tasks
        for n, i in enumerate(view.items.tolist()):
            number = int(plan.samples.sample[i])
            parts = run.datasets[plan.samples.dataset[i]].shards[number >> 32].parts(number & 0xFFFFFFFF)
            tokens = tensors["token_ids"][tensors["cu_lengths"][n] : tensors["cu_lengths"][n + 1]]
            kept = "".join(parts.texts).encode()[: plan.samples.text_tokens[i]]
            assert bytes(tokens[tokens < 256].tolist()) == kept
            num_texts += len(parts.texts)
        assert len(tensors["embedding_slots"]) == (tensors["token_ids"] == run.job.stream.tokenizer.image).sum()
        assert len(tensors["condition_slots"]) == (tensors["token_ids"] == run.job.stream.tokenizer.query).sum()
    assert num_texts > 50


def test_embeddings_and_conditions_have_as_many_rows_on_both_sides(run: Run) -> None:
    received = {"embedding_slots": 0, "condition_slots": 0}
    sent = {"embedding_slots": 0, "condition_slots": 0}
    for plan, view in run.views():
        shapes = {t.name: t.shape for t in view_tensors(run.job.spec, plan, view)}
        if view.kind is ModuleKind.BACKBONE:
            for name in received:
                received[name] += shapes[name][0]
        elif view.kind is ModuleKind.ENCODER:
            sent["embedding_slots"] += shapes["patches"][0] // 4
        else:
            sent["condition_slots"] += 4 * (shapes["condition_offsets"][0] - 1)
    assert received == sent
    assert all(received.values())


def test_bytes_do_not_depend_on_the_buffer_or_the_threads(run: Run) -> None:
    for plan, view in run.views():
        once = run.prepare(plan, view)
        again = run.prepare(plan, view, filler=171, threads=4)
        assert np.array_equal(once.buffer, again.buffer)
        assert np.array_equal(once.validity, again.validity)


def test_named_tensors_alone(run: Run) -> None:
    for plan, view in run.views():
        whole = tensors_of(run.prepare(plan, view))
        for name in NAMES[view.kind]:
            alone = run.prepare(plan, view, [name], filler=171)
            assert [(t.name, t.offset) for t in alone.tensors] == [(name, 0)]
            assert np.array_equal(tensors_of(alone)[name], whole[name])
            assert (alone.validity != Validity.INVALID).all()
        pair = run.prepare(plan, view, NAMES[view.kind][2:0:-1])
        assert [t.name for t in pair.tensors] == NAMES[view.kind][1:3]


def test_positions_of_three_axes_come_where_they_are_named(run: Run) -> None:
    """Their text is as in `position_ids` up to the first image; each image has its grid."""
    num_images = 0
    for plan, view in run.views(ModuleKind.BACKBONE):
        assert "rotary_positions" not in {t.name for t in view_tensors(run.job.spec, plan, view)}
        names = ["rotary_positions", "position_ids", "embedding_slots", "cu_lengths"]
        tensors = tensors_of(run.prepare(plan, view, names, filler=171))
        found, slots = tensors["rotary_positions"], tensors["embedding_slots"]
        assert found.shape == (3, len(tensors["position_ids"]))
        assert (found[:, tensors["cu_lengths"][:-1]] == 0).all()
        text = np.setdiff1d(np.arange(found.shape[1]), slots)
        assert (found[:, text] == found[0, text]).all()
        samples = plan.samples
        for i in view.items[samples.task[view.items] == Task.UNDERSTANDING].tolist():
            for image in range(samples.image_offsets[i], samples.image_offsets[i + 1]):
                rows, columns = samples.image_rows[image] // 2, samples.image_columns[image] // 2
                mine, slots = slots[: rows * columns], slots[rows * columns :]
                time, row, column = found[:, mine] - found[0, mine[0]]
                assert not time.any()
                assert np.array_equal(row * columns + column, np.arange(rows * columns))
                assert (found[:, mine[-1] + 1] == found[0, mine[0]] + max(rows, columns)).all()
                num_images += 1
        assert not len(slots)
    assert num_images > 20


def test_requests_that_do_not_fit_are_refused(run: Run) -> None:
    plan, view = next(run.views(ModuleKind.ENCODER))
    with pytest.raises(UnknownTensorError, match="has no tensor labels, pixels; it has patches, grid, cu_patches"):
        view_tensors(run.job.spec, plan, view, ["pixels", "grid", "labels"])
    tensors = view_tensors(run.job.spec, plan, view)
    size = total_bytes(tensors)
    for buffer in (np.zeros(size - 1, np.uint8), np.zeros(size, np.int8), np.zeros(2 * size, np.uint8)[::2]):
        with pytest.raises(ValueError, match=rf"contiguous uint8 \[{size}\] is required"):
            prepare_view(run.job.spec, plan, view, run.datasets, tensors, buffer)


def corrupt(folder: Path, dataset: Dataset, position: int) -> None:
    """Overwrite the middle of one PNG, so that its checksum fails."""
    shard = dataset.shards[0]
    ref = shard.image(position, 0)
    path = folder / shard.name
    content = bytearray(path.read_bytes())
    middle = ref.offset + ref.length // 2
    content[middle : middle + 8] = bytes(b ^ 0xFF for b in content[middle : middle + 8])
    path.write_bytes(content)


@pytest.mark.parametrize("ratio", ["0", "1"])
def test_a_bad_image_keeps_its_slot(tmp_path: Path, ratio: str) -> None:
    folder = write_pairs(tmp_path, num_samples=12, shard_size=12, formats=("PNG",))
    build_index(folder, workers=1)
    corrupt(folder, Dataset.open(folder), position=5)
    run = open_run([folder], steps=1, ratio=ratio)
    invalid = []
    for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR):
        for plan, view in run.views(kind):
            prepared = run.prepare(plan, view, filler=171)
            tensors = tensors_of(prepared)
            for n, item in enumerate(view.items):
                _, _, i = image_of(run, plan, int(item))
                patches = tensors["patches"][tensors["cu_patches"][n] : tensors["cu_patches"][n + 1]]
                assert (prepared.validity[n] == Validity.VALID) == patches.any()
                invalid += [] if patches.any() else [int(plan.samples.sample[i])]
            if kind is ModuleKind.GENERATOR:
                assert tensors["loss_mask"].tolist() == (prepared.validity == Validity.VALID).astype(int).tolist()
    # the step is longer than the dataset: every pass meets the same image
    assert set(invalid) == {5}


def test_storage_trouble_is_no_verdict_on_the_image(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, num_samples=12, shard_size=12)
    run = open_run([folder], steps=1, ratio="0")
    plan, view = next((p, v) for p, v in run.views(ModuleKind.ENCODER) if v.num_items)
    tensors = view_tensors(run.job.spec, plan, view)
    buffer = np.zeros(total_bytes(tensors), np.uint8)
    prepared = prepare_view(run.job.spec, plan, view, run.datasets, tensors, buffer)
    path = folder / "00000.tar"
    content = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(StaleIndexError, match="has 0 bytes"):
        prepared.tasks[0]()
    prepared.finish()
    assert (prepared.validity == Validity.INVALID).all(), "nothing is taken for valid before its task has run"
    path.write_bytes(content)
    for task in prepared.tasks:
        task()
    prepared.finish()
    assert (prepared.validity == Validity.VALID).all()


@dataclass
class Watched:
    """A dataset that notes how many images were decoded before each read."""

    reads_ahead: ClassVar[bool] = False
    dataset: Dataset
    num_decoded: Callable[[], int]
    seen: list[int]

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.dataset.shards

    def read(self, ref: ImageRef) -> bytes:
        return self.read_all((ref,))[0]

    def read_all(self, refs: Sequence[ImageRef]) -> list[bytes]:
        self.seen += [self.num_decoded()] * len(refs)
        return self.dataset.read_all(refs)


@pytest.mark.parametrize("limit", [0, decoding.READ_AT_ONCE_BYTES])
def test_small_images_of_a_task_are_read_before_any_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(decoding, "READ_AT_ONCE_BYTES", limit)
    run = open_run([write_pairs(tmp_path, num_samples=8, shard_size=8)], steps=1, ratio="0")
    plan, view = next((p, v) for p, v in run.views(ModuleKind.ENCODER) if v.num_items > 1)
    expected = run.prepare(plan, view).buffer
    tensors = view_tensors(run.job.spec, plan, view)
    watched = Watched(run.datasets[0], lambda: int(prepared.images.valid.sum()), [])
    buffer = np.zeros(total_bytes(tensors), np.uint8)
    prepared = prepare_view(run.job.spec, plan, view, [cast(Dataset, watched)], tensors, buffer)
    read = sum(task() for task in prepared.tasks)
    per_task = decoding.IMAGES_PER_TASK if limit else 1
    assert watched.seen == [i // per_task * per_task for i in range(view.num_items)]
    assert read == sum(len(image_of(run, plan, item)[0]) for item in view.items.tolist())
    prepared.finish()
    assert np.array_equal(buffer, expected)
