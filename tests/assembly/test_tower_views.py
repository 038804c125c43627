"""Views of towers, from real shards: layout, texts of several parts, images that cannot be decoded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembly.test_prepared_views import TOKENIZER, Run, corrupt, tensors_of
from shards import draw_caption, make_image, write_pairs, write_tar

from dataserver.assembly import UnknownTensorError, Validity, tokenizer_spec, view_tensors
from dataserver.dataset import Dataset, build_index, count_tokens
from dataserver.jobs import JobPlanner
from dataserver.planning.job.identity import parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import ViewPlan

NAMES = {"image": ["patches", "grid", "cu_patches"], "text": ["token_ids", "position_ids", "cu_lengths"]}


def open_towers(folder: Path, batch: int = 6, seq_len: int = 40) -> Run:
    """A job of an image tower of three ranks and a text tower of two over one dataset."""
    build_index(folder, workers=1)
    count_tokens(folder, TOKENIZER)
    dataset = Dataset.open(folder)
    towers: list[dict[str, Any]] = [
        {"name": "image", "kind": "tower", "modality": "image", "dp": 3},
        {"name": "text", "kind": "tower", "modality": "text", "dp": 2, "pp": 2},
    ]
    job = parse_job(
        {
            "stream": {
                "datasets": [{"name": "d", "fingerprint": dataset.fingerprint}],
                "tokenizer": tokenizer_spec(TOKENIZER).model_dump(),
                "sizing": {"patch": 7, "merge": 2, "max_patches": 64},
                "seq_len": seq_len,
                "global_batch": 2 * batch,
                "contrastive_batch": batch,
                "packing": {"enabled": False},
            },
            "execution": {"modules": towers, "layout": {"kind": "contrastive"}, "end": {"steps": 2}},
        }
    )
    return Run(job, [dataset], JobPlanner(job, [dataset]))


def views_of(run: Run, tower: str) -> Iterator[tuple[StepPlan, ViewPlan]]:
    return ((plan, view) for plan, view in run.views() if view.module == tower)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Documents of one image and up to three texts around it."""
    rng, folder = np.random.default_rng(5), tmp_path_factory.mktemp("towers")
    for shard in range(3):
        members: list[tuple[str, bytes]] = []
        for number in range(8):
            key = f"{shard:05d}{number:04d}"
            texts: list[str | None] = [draw_caption(rng, 4) for _ in range(rng.integers(1, 4))]
            place = int(rng.integers(0, len(texts) + 1))
            images: list[str | None] = [None] * len(texts)
            texts.insert(place, None)
            images.insert(place, f"{key}.0.jpg")
            members.append((f"{key}.0.jpg", make_image(rng, 60, 80)))
            members.append((f"{key}.json", json.dumps({"texts": texts, "images": images}).encode()))
        write_tar(folder / f"{shard:05d}.tar", members)
    return open_towers(folder)


def test_views_and_bytes(run: Run) -> None:
    for plan, view in run.views():
        prepared = run.prepare(plan, view)
        assert [t.name for t in prepared.tensors] == NAMES[view.module]
        known = Validity.VALID if view.module == "image" else Validity.UNKNOWN
        assert prepared.validity.tolist() == [known] * view.num_items
        again = run.prepare(plan, view, filler=171, threads=4)
        assert np.array_equal(prepared.buffer, again.buffer)
        for name, whole in tensors_of(prepared).items():
            assert np.array_equal(tensors_of(run.prepare(plan, view, [name], filler=171))[name], whole)
    plan, view = next(views_of(run, "text"))
    with pytest.raises(
        UnknownTensorError, match=r"text \(tower\) has no tensor labels; it has token_ids, position_ids"
    ):
        view_tensors(run.job.spec, plan, view, ["labels"])


def test_a_text_is_all_texts_of_its_sample(run: Run) -> None:
    ids, several, cut = run.job.stream.tokenizer, 0, 0
    for plan, view in views_of(run, "text"):
        tensors = tensors_of(run.prepare(plan, view))
        for n, i in enumerate(view.items.tolist()):
            shard, row = divmod(int(plan.samples.sample[i]), 1 << 32)
            texts = run.datasets[0].shards[shard].parts(row).texts
            text = "".join(texts).encode()
            several += len(texts) > 1
            cut += len(text) > 38
            here = slice(*tensors["cu_lengths"][n : n + 2])
            assert tensors["token_ids"][here].tolist() == [ids.bos, *text[:38], ids.eos]
            assert tensors["position_ids"][here].tolist() == list(range(min(len(text), 38) + 2))
    assert several
    assert cut


def test_a_bad_image_keeps_its_slot_and_its_text(tmp_path: Path) -> None:
    """The image tower says which pair does not count; the text tower need not know."""
    folder = write_pairs(tmp_path, num_samples=12, shard_size=12, formats=("PNG",))
    build_index(folder, workers=1)
    corrupt(folder, Dataset.open(folder), position=5)
    run = open_towers(folder)
    invalid = []
    for plan, view in run.views():
        prepared = run.prepare(plan, view, filler=171)
        tensors = tensors_of(prepared)
        assert view.module == "image" or (prepared.validity == Validity.UNKNOWN).all()
        for n in np.flatnonzero(prepared.validity == Validity.INVALID):
            assert not tensors["patches"][tensors["cu_patches"][n] : tensors["cu_patches"][n + 1]].any()
            invalid.append(int(plan.samples.sample[view.items[n]]))
    assert invalid == [5, 5]
