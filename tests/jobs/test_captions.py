"""Jobs that read named captions, over real shards: what steps hold, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data
from shards import draw_caption, make_image, write_tar

from dataserver.assembly.tokens import load_tokenizer, tokenizer_spec
from dataserver.dataset import CaptionError, Dataset, IndexRules, build_index, count_tokens, parse_captions, texts_key
from dataserver.jobs import JobPlanner
from dataserver.planning.job.identity import parse_job
from dataserver.planning.stream.captions import captions_of
from dataserver.planning.stream.samples import ROW_BITS

BYTES = load_tokenizer("bytes", None)
SHARDS, ROWS = 3, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose captions are of very different lengths; every fifth sample lacks the long one."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("captioned")
    for shard in range(SHARDS):
        members = []
        for row in range(ROWS):
            key = f"{shard}{row:03}"
            entries = {} if row % 5 == 0 else {"long": f"long {key} " + draw_caption(rng, 40)}
            members += [
                (f"{key}.jpg", make_image(rng, 48, 32)),
                (f"{key}.txt", f"own {key}".encode()),
                (f"{key}.recaption.json", json.dumps(entries).encode()),
                (f"{key}.short.txt", f"short {key} {'x' * row}".encode()),
            ]
        write_tar(folder / f"{shard}.tar", members)
    captions = parse_captions(["long=recaption.json:long", "short=short.txt"])
    build_index(folder, workers=1, rules=IndexRules(captions=captions))
    for name in ("own", "long", "short"):
        count_tokens(folder, BYTES, caption=name)
    return folder


def planner(dataset: Dataset, seed: int = 0, seq_len: int = 512, packed: bool = True, **entry: Any) -> JobPlanner:
    stream = {
        "datasets": [{"name": "d", "fingerprint": dataset.fingerprint, **entry}],
        "tokenizer": tokenizer_spec(BYTES).model_dump(mode="json"),
        "seq_len": seq_len,
        "global_batch": 8,
        "packing": {"enabled": packed},
        "seed": seed,
    }
    return JobPlanner(parse_job(job_data(stream=stream, execution={"end": {"epochs": 4}}, backbone=(2, 1))), [dataset])


def texts(jobs: JobPlanner, dataset: Dataset) -> list[tuple[int, int, str]]:
    """Epoch, sample and text of all steps, whose sizes must be those of the texts."""
    found = []
    stream = jobs.job.stream
    for step in range(jobs.num_steps):
        samples = jobs.plan(step).samples
        names = captions_of(stream, samples.dataset, samples.epoch, samples.sample)
        for i, name in enumerate(names):
            shard, row = divmod(int(samples.sample[i]), 1 << ROW_BITS)
            (ids,) = dataset.document(shard, row, texts_key(BYTES.digest, name)).texts
            assert len(ids) == samples.text_tokens[i] + samples.truncated_tokens[i]
            found.append((int(samples.epoch[i]), int(samples.sample[i]), bytes(ids.tolist()).decode()))
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_each_sample_draws_a_caption_in_each_epoch(folder: Path, packed: bool) -> None:
    dataset = Dataset.open(folder)
    captions = [{"name": "long", "weight": "2"}, {"name": "short", "weight": "1"}, {"name": "own", "weight": "1"}]
    jobs = planner(dataset, packed=packed, captions=captions)
    found = texts(jobs, dataset)
    first = [(epoch, sample) for epoch, sample, _ in found if epoch < 4]
    assert len(first) == len(set(first)) == 4 * SHARDS * ROWS
    starts = [text.split()[0] for _, sample, text in found if (sample & 0xFFFFFFFF) % 5]
    assert 0.35 < starts.count("long") / len(starts) < 0.65
    assert 0.12 < starts.count("short") / len(starts) < 0.4
    lacking = {text.split()[0] for _, sample, text in found if (sample & 0xFFFFFFFF) % 5 == 0}
    assert lacking == {"short", "own"}
    by_sample: dict[int, set[str]] = {}
    for _, sample, text in found:
        by_sample.setdefault(sample, set()).add(text.split()[0])
    assert any(len(drawn) > 1 for drawn in by_sample.values())
    again = planner(Dataset.open(folder), packed=packed, captions=captions)
    last = again.num_steps - 1
    assert again.plan(last).hash == jobs.plan(last).hash, "a resumed job draws alike"
    assert texts(planner(dataset, 1, packed=packed, captions=captions), dataset) != found


def test_one_caption_is_read_by_all_samples_that_have_it(folder: Path) -> None:
    dataset = Dataset.open(folder)
    starts = {(s & 0xFFFFFFFF) % 5 == 0: set() for s in range(2)}
    for _, sample, text in texts(planner(dataset, caption="long"), dataset):
        starts[(sample & 0xFFFFFFFF) % 5 == 0].add(text.split()[0])
    assert starts == {True: {"own"}, False: {"long"}}
    own = texts(planner(dataset), dataset)
    assert texts(planner(dataset, caption="own"), dataset) == own


def test_steps_are_as_full_as_the_mean_of_the_captions(folder: Path) -> None:
    dataset = Dataset.open(folder)
    captions = [{"name": "long", "weight": "1"}, {"name": "own", "weight": "1"}]
    steps = {
        name: planner(dataset, **entry).num_steps
        for name, entry in (("long", {"caption": "long"}), ("own", {}), ("drawn", {"captions": captions}))
    }
    assert steps["own"] < steps["drawn"] < steps["long"]


def test_long_captions_are_cut_and_the_cut_is_planned(folder: Path) -> None:
    dataset = Dataset.open(folder)
    captions = [{"name": "long", "weight": "1"}, {"name": "own", "weight": "1"}]
    jobs = planner(dataset, seq_len=64, captions=captions)
    samples = [jobs.plan(step).samples for step in range(jobs.num_steps)]
    assert sum(int(s.truncated_tokens.sum()) for s in samples) > 0
    assert max(int(s.tokens.max()) for s in samples) == 64


def test_a_caption_that_the_index_lacks_is_refused_by_name(folder: Path) -> None:
    dataset = Dataset.open(folder)
    for entry in ({"caption": "huge"}, {"captions": [{"name": "own"}, {"name": "huge"}]}):
        with pytest.raises(CaptionError, match=r"names the caption 'huge', the index has \['own', 'long', 'short'\]"):
            planner(dataset, **entry)
