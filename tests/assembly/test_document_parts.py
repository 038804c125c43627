"""Documents in parts over real shards: their tokens, labels and images, put together again, are the documents."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembly.test_prepared_views import Run, tensors_of
from images.pictures import decode
from shards import draw_caption, make_image, write_tar

from dataserver.assembly import ByteTokenizer, tokenizer_spec
from dataserver.assembly.document_parts import PartError, part_of
from dataserver.assembly.image_transforms import draw_transforms
from dataserver.dataset import Dataset, TokenizedDocument, build_index, count_tokens
from dataserver.images import ImageShape
from dataserver.jobs import JobCache, JobPlanner
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import canonical_json, parse_job
from dataserver.planning.layouts.shared.sequences import pack_step
from dataserver.planning.stream.randomness import Operator, dataset_key, draws
from dataserver.planning.stream.samples import ROW_BITS
from dataserver.planning.stream.tiles import num_parts
from dataserver.transforms import NO_TRANSFORMS

TOKENIZER = ByteTokenizer()
SEQ_LEN = 160
MASK = (1 << ROW_BITS) - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 12 items, the text of some longer than several sequences; images of 32 to 60 pixels."""
    folder, rng = tmp_path_factory.mktemp("books"), np.random.default_rng(7)
    for shard in range(3):
        members = []
        for n in range(6):
            key = f"{shard}{n}"
            texts: list[str | None] = []
            images: list[str | None] = []
            for item in range(int(rng.integers(1, 13))):
                is_text = rng.random() < 0.5
                texts.append(draw_caption(rng, int(np.exp(rng.normal(2.2, 1.2))) + 1) if is_text else None)
                images.append(None if is_text else f"{item}.png")
                if not is_text:
                    image = make_image(rng, int(rng.integers(32, 61)), int(rng.integers(32, 61)), "PNG")
                    members.append((f"{key}.{item}.png", image))
            members.append((f"{key}.json", json.dumps({"texts": texts, "images": images}).encode()))
        write_tar(folder / f"{shard}.tar", members)
    build_index(folder, workers=1)
    count_tokens(folder, TOKENIZER)
    return folder


def job_of(dataset: Dataset, end: dict[str, int], documents: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    split = {} if documents is None else {"documents": documents}
    stream = {
        "datasets": [{"name": "books", "fingerprint": dataset.fingerprint, **split}],
        "tokenizer": tokenizer_spec(TOKENIZER).model_dump(),
        "sizing": {"patch": 7, "merge": 2, "max_patches": 64},
        "seq_len": SEQ_LEN,
        "global_batch": 4,
        "shuffle_window": 2,
        **changes,
    }
    modules = [{"name": "vit", "kind": "encoder", "dp": 2}, {"name": "llm", "kind": "backbone", "dp": 2}]
    return {"stream": stream, "execution": {"modules": modules, "end": end, "microbatch": 2}}


def open_run(folder: Path, end: dict[str, int], documents: dict[str, Any] | None, **changes: Any) -> Run:
    dataset = Dataset.open(folder)
    job = parse_job(job_of(dataset, end, documents, **changes))
    return Run(job, [dataset], JobPlanner(job, [dataset], JobCache()))


def served(run: Run) -> Iterator[tuple[tuple[int, int], int, int, list[int], list[int]]]:
    """Epoch and sample, part, parts, tokens and labels of each part in the views of all ranks."""
    for plan, view in run.views(ModuleKind.BACKBONE):
        arrays = tensors_of(run.prepare(plan, view))
        ends = arrays["cu_lengths"].tolist()
        for n, i in enumerate(view.items.tolist()):
            where = slice(ends[n], ends[n + 1])
            of, parts = plan.samples, plan.samples.parts
            assert parts is not None
            name = int(of.epoch[i]), int(of.sample[i])
            yield name, *parts[i, :2].tolist(), arrays["token_ids"][where].tolist(), arrays["labels"][where].tolist()


@pytest.mark.parametrize("together", [False, pytest.param(True, marks=pytest.mark.long)])
def test_parts_put_together_are_the_documents(folder: Path, together: bool) -> None:
    run = open_run(folder, {"epochs": 1}, {"max_images": 3, "together": together})
    ids = run.job.stream.tokenizer
    found: dict[tuple[int, int], dict[int, tuple[int, list[int], list[int]]]] = defaultdict(dict)
    for name, part, parts, tokens, labels in served(run):
        assert part not in found[name]
        found[name][part] = parts, tokens, labels
    assert len(found) == sum(shard.num_samples for shard in run.datasets[0].shards)
    several = 0
    for (_, sample), parts_of in found.items():
        count = parts_of[0][0]
        assert sorted(parts_of) == list(range(count))
        several += count > 1
        items: list[int] = []
        for n in range(count):
            _, tokens, labels = parts_of[n]
            assert (tokens[0], tokens[-1]) == (ids.bos, ids.eos)
            assert len(tokens) <= SEQ_LEN
            assert tokens.count(ids.boi) <= 3
            items += tokens[1:-1]
            learned = [label for label in labels if label != -100]
            texts = [token for token in tokens[1:-1] if token < 256]
            assert learned == texts + ([ids.eos] if n == count - 1 else [])
        shard, row = run.datasets[0].shards[sample >> ROW_BITS], sample & MASK
        document = shard.document(row, ids.digest)
        whole, bodies = list[int](), iter(document.texts)
        image = items_of_images(items, ids)
        for kind in document.kinds:
            whole += [ids.boi, *[ids.image] * next(image), ids.eoi] if kind else next(bodies).tolist()
        assert items == whole
        assert next(image, None) is None
    assert several > 6
    text_tokens = sum(run.planner.plan(step).text_tokens for step in range(run.planner.num_steps))
    every = [label for of in found.values() for _, _, labels in of.values() for label in labels]
    assert text_tokens == sum(label != -100 for label in every)


def items_of_images(items: list[int], ids: Any) -> Iterator[int]:
    """The number of embeddings of each image of a document."""
    for n, token in enumerate(items):
        if token == ids.boi:
            yield items.index(ids.eoi, n) - n - 1


def test_each_image_of_a_document_is_decoded_from_its_own_bytes(folder: Path) -> None:
    run = open_run(folder, {"epochs": 1}, {"max_images": 2})
    seen = set()
    for plan, view in run.views(ModuleKind.ENCODER):
        arrays = tensors_of(run.prepare(plan, view))
        ends = arrays["cu_patches"].tolist()
        sample, number = plan.samples.locate(view.items)
        for n, item in enumerate(view.items.tolist()):
            of, i = plan.samples, int(sample[n])
            assert of.parts is not None
            shard = run.datasets[0].shards[int(of.sample[i]) >> ROW_BITS]
            ref = shard.image(int(of.sample[i]) & MASK, int(number[n]))
            sides = int(of.image_rows[item]), int(of.image_columns[item])
            shape = ImageShape(ref.width, ref.height, ref.orientation, *sides)
            valid, expected = decode(run.datasets[0].read(ref), shape, run.job.stream.sizing)
            assert valid
            assert np.array_equal(arrays["patches"][ends[n] : ends[n + 1]], expected)
            name = int(of.epoch[i]), int(of.sample[i]), int(number[n])
            assert name not in seen
            seen.add(name)
    assert len(seen) == sum(len(shard.image_bytes()) for shard in run.datasets[0].shards)


TILES = {"choice": "aspect", "min_tiles": 1, "max_tiles": 4}
TILED = {"rule": "tiles", "patch": 7, "merge": 2, "side": 14, "resampling": "bicubic", "tiles": TILES}


def test_limits_count_images_and_not_their_tiles(folder: Path) -> None:
    """A part has two images, and a sequence three, of however many tiles."""
    run = open_run(folder, {"epochs": 1}, {"max_images": 2}, sizing=TILED, packing={"enabled": True, "max_images": 3})
    in_parts, in_sequences = set[tuple[int, int]](), set[tuple[int, int]]()
    for step in range(run.planner.num_steps):
        samples = run.planner.plan(step).samples
        assert samples.image_layout is not None
        tiles = num_parts(samples.image_layout, run.job.stream.sizing.tiles)
        sequence, _ = pack_step(run.job, samples)
        of_image = np.repeat(np.arange(len(samples)), np.diff(samples.image_offsets))
        for found, of in ((in_parts, of_image), (in_sequences, sequence[of_image])):
            found.update(
                zip(np.bincount(of).tolist(), np.bincount(of, weights=tiles).astype(int).tolist(), strict=True)
            )
    for found, most in ((in_parts, 2), (in_sequences, 3)):
        assert max(images for images, _ in found) == most
        assert max(tiles for images, tiles in found if images == most) > 2 * most


def test_images_of_later_parts_are_transformed_as_those_of_whole_documents(folder: Path) -> None:
    transforms = [{"kind": "random_resized_crop", "min_area": "0.3"}, {"kind": "horizontal_flip"}]
    run = open_run(folder, {"epochs": 1}, {"max_images": 2}, transforms=transforms)
    later = 0
    for plan, view in run.views(ModuleKind.ENCODER):
        of = plan.samples
        images = list(zip(*(found.tolist() for found in of.locate(view.items)), strict=True))
        drawn = draw_transforms(run.job.stream, of, images, NO_TRANSFORMS.pixels)
        for (i, number), found in zip(images, drawn, strict=True):
            key, epoch, sample = dataset_key("books"), int(of.epoch[i]), int(of.sample[i])
            words = draws(0, Operator.IMAGE_TRANSFORM, key, epoch, sample, 8 * number + 8)[-8:].tolist()
            assert [list(each.words) for each in found] == [words[:4], words[4:]]
            assert of.parts is not None
            later += int(of.parts[i, 0]) > 0
    assert later > 6
    with pytest.raises(ValueError, match="image 9 of sample 0 of the step has 0 words for its transforms, 8 are req"):
        draw_transforms(run.job.stream, replace(of, parts=None), [(0, 9)], NO_TRANSFORMS.pixels)


def test_parts_that_follow_each_other_read_their_document_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(folder, {"epochs": 1}, {"max_images": 2, "together": True})
    read, document = list[tuple[int, int]](), Dataset.document

    def counted(dataset: Dataset, shard: int, row: int, digest: str) -> TokenizedDocument:
        read.append((shard, row))
        return document(dataset, shard, row, digest)

    monkeypatch.setattr(Dataset, "document", counted)
    parts = 0
    for plan, view in run.views(ModuleKind.BACKBONE):
        read.clear()
        run.prepare(plan, view)
        wanted = [divmod(int(sample), 1 << ROW_BITS) for sample in plan.samples.sample[view.items]]
        assert read == [of for n, of in enumerate(wanted) if n == 0 or of != wanted[n - 1]]
        parts += len(wanted) - len(read)
    assert parts > 6


def names(jobs: JobPlanner, steps: range) -> list[tuple[int, int, int]]:
    """Epoch, sample and part of everything in some steps."""
    found = []
    for step in steps:
        of = jobs.samples(step)
        parts = [0] * len(of) if of.parts is None else of.parts[:, 0].tolist()
        found += list(zip(of.epoch.tolist(), of.sample.tolist(), parts, strict=True))
    return found


@pytest.mark.parametrize(
    ("version", "together"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(2, False, marks=pytest.mark.long),
    ],
)
def test_a_stream_that_goes_on_serves_the_parts_that_are_left(folder: Path, version: int, together: bool) -> None:
    documents = {"max_images": 3, "together": together}
    first = open_run(folder, {"epochs": 2}, documents, order_version=version).planner
    had = names(first, range(5))
    before = {"step": 5, "stream": json.loads(canonical_json(first.job.stream))}
    changes = {"order_version": version, "continues": before}
    second = open_run(folder, {"epochs": 2}, documents, **changes, global_batch=8, seed=3).planner
    left = names(second, range(5, second.num_steps))
    assert sorted({*had, *left}) == sorted({*names(first, range(first.num_steps))})
    assert len(had) + len(left) == len({*had, *left})
    begun = {of[:2] for of in had} & {of[:2] for of in left}
    assert begun

    other = open_run(folder, {"epochs": 2}, {"max_images": 1}, **changes).planner
    rest = names(other, range(5, other.num_steps))
    assert not {of[:2] for of in had} & {of[:2] for of in rest}
    every = {(epoch, sample) for epoch, sample, _ in names(first, range(first.num_steps))}
    assert {of[:2] for of in had} | {of[:2] for of in rest} == every

    cut = open_run(folder, {"epochs": 2}, None, **changes).planner
    rest = names(cut, range(5, cut.num_steps))
    assert not {of[:2] for of in had} & {of[:2] for of in rest}
    third = {"step": 7, "stream": json.loads(canonical_json(cut.job.stream))}
    again = open_run(folder, {"epochs": 2}, documents, **changes | {"continues": third}).planner
    last = {of[:2] for of in names(again, range(7, again.num_steps))}
    gone = {of[:2] for of in had} | {of[:2] for of in names(cut, range(5, 7))}
    assert not gone & last
    assert gone | last == every


def test_parts_that_a_document_does_not_have_are_refused() -> None:
    texts = (np.arange(5, dtype=np.int32), np.arange(5, 9, dtype=np.int32))
    document = TokenizedDocument((0, 1, 0, 1), texts)
    found = part_of(document, (1, 3, 3, 0), 4, 1)
    assert (found.kinds, [text.tolist() for text in found.texts]) == ((0, 1, 0), [[3, 4], [5, 6]])
    assert not any(np.shares_memory(text, whole) for text in found.texts for whole in texts)
    assert part_of(document, (2, 3, 7, 1), 2, 1).kinds == (0, 1)
    last = (2, 3, 7, 1)
    for part, tokens, images in ((last, 3, 1), (last, 2, 2), (last, 1, 1), ((1, 2, 0, 0), 9, 1)):
        with pytest.raises(PartError, match=r"it has 9 text tokens and 2 images"):
            part_of(document, part, tokens, images)
