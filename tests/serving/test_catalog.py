import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving.harness import Running, index, job_data, running, tensors
from shards import write_pairs, write_texts
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dataserver.assembly import load_tokenizer
from dataserver.dataset import IndexRules, TextOnly, build_index, count_tokens
from dataserver.dataset.dataset import Dataset
from dataserver.dataset.quarantine import Quarantine
from dataserver.jobs import Catalog, DatasetMismatchError, DatasetUnknownError, fill_job
from dataserver.planning.job.identity import parse_job
from dataserver.serving.config import load_config


def samples(server: Running, data: dict[str, Any]) -> set[int]:
    """The samples of dataset 0 over the whole job."""
    job_id = server.create(data).job_id
    return {
        n
        for rank in range(2)
        for header, _ in server.read(job_id, "llm", rank).microbatches
        for n in header.items.sample
    }


def test_a_job_is_filled_with_what_it_leaves_out_and_nothing_else(datasets: dict[str, Path]) -> None:
    catalog = Catalog.open(load_config(None, {"datasets": datasets}))
    data = job_data(seed=7)
    before = json.dumps(data)
    found = fill_job(data, catalog)
    assert json.dumps(data) == before, "the caller's job is not touched"
    assert found["stream"]["datasets"][0]["fingerprint"] == catalog.datasets["pairs"].fingerprint
    assert found["stream"]["tokenizer"]["vocab_size"] == 262
    assert found["stream"]["seed"] == 7
    assert fill_job(found, catalog) == found
    found["stream"]["tokenizer"]["eos"] = 99
    assert fill_job(found, catalog)["stream"]["tokenizer"]["eos"] == 99
    with pytest.raises(DatasetUnknownError, match="'ghost'"):
        fill_job(job_data(datasets=[{"name": "ghost"}]), catalog)


@pytest.mark.parametrize("data", [None, 3, [], {}, {"stream": 1}, {"stream": {"datasets": [3, {"name": 4}][:1]}}])
def test_what_is_no_job_is_left_for_the_parser_to_refuse(data: Any, datasets: dict[str, Path]) -> None:
    catalog = Catalog.open(load_config(None, {"datasets": datasets}))
    with pytest.raises(ValueError, match="the job is not valid"):
        parse_job(fill_job(yaml.safe_load(yaml.safe_dump(data)), catalog))


def test_a_quarantine_list_counts_only_for_jobs_that_pin_it(tmp_path: Path) -> None:
    folder = index(write_texts(tmp_path / "d", 24, 24))
    keys = Dataset.open(folder).shards[0].keys()
    Quarantine.from_samples([("00000.tar", keys[5]), ("00000.tar", keys[9])]).save(tmp_path / "list")
    data = job_data(datasets=[{"name": "d"}], end={"epochs": 1}, generation={"ratio": "0"})
    with running({"d": folder}, quarantines={"d": tmp_path / "list"}) as server:
        assert samples(server, data) == set(range(24)) - {5, 9}
        data["stream"]["datasets"][0]["quarantine"] = ""
        assert samples(server, data) == set(range(24))


def test_a_filter_leaves_samples_out(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "d", 24, 24))
    punsafe = Dataset.open(folder).shards[0].column("punsafe").to_pylist()
    entry = {"name": "d", "filter": "punsafe < 0.5"}
    data = job_data(datasets=[entry], end={"epochs": 1}, generation={"ratio": "0"})
    with running({"d": folder}) as server:
        assert samples(server, data) == {row for row, value in enumerate(punsafe) if value < 0.5}


def test_a_hugging_face_tokenizer_serves_its_own_tokens(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "d", 16, 16)
    build_index(folder, workers=1)
    texts = [Dataset.open(folder).shards[0].parts(row).texts[0] for row in range(16)]
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel()
    model.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    file = tmp_path / "tokenizer.json"
    model.save(str(file))
    count_tokens(folder, load_tokenizer("small", file))
    with running({"d": folder}, tokenizers={"small": file}) as server:
        fields: dict[str, Any] = {"datasets": [{"name": "d"}], "tokenizer": {"name": "small"}}
        job = server.create(job_data(**fields, end={"epochs": 1}, generation={"ratio": "0"}))
        found = {}
        for rank in range(2):
            for header, body in server.read(job.job_id, "llm", rank).microbatches:
                views = tensors(header, body)
                for i, row in enumerate(header.items.sample):
                    first, last = views["cu_lengths"][i : i + 2]
                    found[row] = views["token_ids"][first + 1 : last - 1].tolist()
        assert found == {row: model.encode(text).ids for row, text in enumerate(texts)}


def test_interleaved_documents_are_served_whole(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "interleaved-mini"
    build_index(folder, tmp_path / "index", workers=1)
    count_tokens(folder, load_tokenizer("bytes"), tmp_path / "index")
    with running({"d": folder}, index_dirs={"d": tmp_path / "index"}) as server:
        fields: dict[str, Any] = {"datasets": [{"name": "d"}], "seq_len": 4096, "global_batch": 8}
        job = server.create(job_data(**fields, end={"epochs": 1}, generation={"ratio": "0"}))
        documents, images = [], []
        for rank in range(2):
            for header, _ in server.read(job.job_id, "llm", rank).microbatches:
                documents += list(header.items.sample)
            for header, _ in server.read(job.job_id, "vit", rank).microbatches:
                images += list(zip(header.items.sample, header.items.image, header.items.validity, strict=True))
        dataset = server.catalog.datasets["d"]
        expected = {(s.position << 32) + row for s in dataset.shards for row in range(s.num_samples)}
        assert len(documents) == len(expected) == 300
        assert set(documents) == expected
        assert len(images) == len(set(images)) == 866


def test_servers_whose_indexes_follow_different_rules_refuse_each_others_jobs(tmp_path: Path) -> None:
    folders = [write_texts(tmp_path / name, 8, 8) for name in ("one", "two")]
    for folder, text_only in zip(folders, TextOnly, strict=True):
        build_index(folder, workers=1, rules=IndexRules(text_only))
        count_tokens(folder, load_tokenizer("bytes"))
    first, second = (Catalog.open(load_config(None, {"datasets": {"d": folder}})) for folder in folders)
    job = parse_job(fill_job(job_data(datasets=[{"name": "d"}]), first))
    assert first.find_datasets(job.stream)
    with pytest.raises(DatasetMismatchError, match="'d'"):
        second.find_datasets(job.stream)
