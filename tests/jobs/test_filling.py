import copy
from typing import Any

import pytest
from builders.jobs import changed
from jobs.written import FINGERPRINT, QUARANTINE, catalog, chats_job, readme_job

from dataserver.jobs import Catalog, DatasetMismatchError, DatasetUnknownError, TokenizerUnknownError, fill_job
from dataserver.planning.job.fields.incomplete import absent_fields, json_pointer, value_at
from dataserver.planning.job.fields.text import parse_json
from dataserver.planning.job.identity import JobSpecError, canonical_json, parse_job

LLAMA = {
    "name": "llama",
    "digest": "6" * 64,
    "vocab_size": 32_006,
    "bos": 32_000,
    "eos": 32_001,
    "boi": 32_002,
    "eoi": 32_003,
    "image": 32_004,
    "query": 32_005,
}
TOKENIZER = ("stream", "tokenizer")
ENTRY = ("stream", "datasets", 0)


def test_the_readme_job_is_filled_with_what_it_leaves_out_and_nothing_else() -> None:
    data = readme_job()
    before = copy.deepcopy(data)
    filled = fill_job(data, catalog("llama"))
    assert data == before, "the caller's job is not touched"
    entry = {**data["stream"]["datasets"][0], "fingerprint": FINGERPRINT, "quarantine": QUARANTINE}
    stream = {**data["stream"], "datasets": [entry], "tokenizer": LLAMA}
    assert filled == {**data, "stream": stream}
    assert [json_pointer(path) for path in absent_fields(data)] == [
        "/stream/datasets/0/fingerprint",
        "/stream/datasets/0/quarantine",
        *(f"/stream/tokenizer/{name}" for name in LLAMA if name != "name"),
    ]
    assert [value_at(filled, path) for path in absent_fields(data)] == [
        *(FINGERPRINT, QUARANTINE),
        *(value for name, value in LLAMA.items() if name != "name"),
    ]


def test_the_job_of_chats_in_the_docs_is_filled_in() -> None:
    data = chats_job()
    data["stream"]["datasets"][0]["name"] = "docs"
    data["stream"]["datasets"][0]["conversations"]["template"] = "2" * 64  # of no folder of a chat model here
    stream = parse_job(fill_job(data, catalog(data["stream"]["tokenizer"]["name"]))).stream
    assert stream.datasets[0].conversations is not None


def test_a_complete_job_is_never_altered() -> None:
    filled = fill_job(readme_job(), catalog("llama"))
    assert absent_fields(filled) == []
    assert fill_job(filled, Catalog({}, {})) is filled, "not even looked up"
    canonical = parse_json(canonical_json(parse_job(filled).spec).decode())
    assert absent_fields(canonical) == []
    assert parse_job(canonical) == parse_job(filled)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*ENTRY, "quarantine"), ""),
        ((*ENTRY, "fingerprint"), "d" * 64),
        ((*TOKENIZER, "vocab_size"), 32_064),
        ((*TOKENIZER, "eos"), 2),
        ((*TOKENIZER, "digest"), "e" * 64),
    ],
)
def test_what_a_job_states_stands(path: tuple[Any, ...], value: Any) -> None:
    filled = fill_job(changed(readme_job(), path, value), catalog("llama"))
    assert filled == changed(fill_job(readme_job(), catalog("llama")), path, value)


def test_a_job_without_a_tokenizer_has_the_only_one() -> None:
    for block in (None, {}, {"eos": 300, "vocab_size": 301}):
        data = readme_job()
        del data["stream"]["tokenizer"]
        if block is not None:
            data["stream"]["tokenizer"] = block
        filled = fill_job(data, catalog())["stream"]["tokenizer"]
        assert (filled["name"], filled["vocab_size"]) == ("bytes", (block or {}).get("vocab_size", 262))
        with pytest.raises(JobSpecError, match=r"names no tokenizer, and there are \['llama', 'bytes'\]: set"):
            fill_job(data, catalog("llama"))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            TOKENIZER,
            {"name": "llama", "vocab_size": 32_000},
            "vocab_size is 32000; .* at least 32006 is required",
        ),
        (TOKENIZER, {"name": "llama", "bos": 32_004}, "bos is 32004, the id that image would be filled in with: state"),
        (TOKENIZER, {"name": "llama", "vocab_size": "32064"}, 'vocab_size: found "32064"; .* without quotes'),
        (TOKENIZER, {"name": "llama", "eos": True}, "stream.tokenizer.eos: found true"),
        (TOKENIZER, {"name": 5}, "stream.tokenizer.name: found 5; it should be a valid string; put it in quotes$"),
        (TOKENIZER, {"nmae": "llama", "name": "llama"}, r"stream.tokenizer.nmae: this key is unknown; is name meant\?"),
        (TOKENIZER, None, "stream.tokenizer: found null"),
        (TOKENIZER, "llama", 'stream.tokenizer: found "llama"'),
        (ENTRY, {"name": 5}, "stream.datasets.0.name: found 5; it should be a valid string; put it in quotes$"),
        (ENTRY, {}, "stream.datasets.0.name: Field required$"),
        (ENTRY, "laion", 'stream.datasets.0: found "laion"'),
        ((*ENTRY, "fingerprint"), None, "stream.datasets.0.fingerprint: found null"),
        (("stream", "datasets"), {"laion": {}}, "stream.datasets: found a mapping"),
        (("stream",), None, "stream: found null"),
    ],
)
def test_what_is_at_odds_names_the_field(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        parse_job(fill_job(changed(readme_job(), path, value), catalog("llama")))


@pytest.mark.parametrize("data", [None, 3, [], {}, "job", {"stream": 1}, {"stream": {"datasets": [3]}}])
def test_what_is_no_job_is_left_for_the_parser_to_refuse(data: Any) -> None:
    with pytest.raises(JobSpecError, match="the job is not valid"):
        parse_job(fill_job(data, catalog()))


def test_what_is_not_here_is_named_with_what_is() -> None:
    with pytest.raises(DatasetUnknownError, match=r"is named 'coyo', there are \['docs', 'laion', 'x'\]: correct"):
        fill_job(changed(readme_job(), (*ENTRY, "name"), "coyo"), catalog("llama"))
    with pytest.raises(TokenizerUnknownError, match=r"is named 'llama', there are \['bytes'\]: correct"):
        fill_job(readme_job(), catalog())


def test_a_dataset_of_other_shards_is_no_dataset_of_the_job() -> None:
    data = changed(readme_job(), (*ENTRY, "fingerprint"), "d" * 64)
    job = parse_job(fill_job(data, catalog("llama")))
    with pytest.raises(DatasetMismatchError, match=r"fingerprint dddd.*the one here has aaaa.*leave fingerprint out"):
        catalog("llama").find_datasets(job.stream)
    job = parse_job(fill_job(changed(readme_job(), (*ENTRY, "quarantine"), "d" * 64), catalog("llama")))
    with pytest.raises(DatasetMismatchError, match=r"quarantine list dddd.*here is bbbb.*leave quarantine out"):
        catalog("llama").find_datasets(job.stream)


def test_a_deeply_nested_job_is_no_defect() -> None:
    data: Any = readme_job()
    inner: Any = []
    for _ in range(600):
        inner = [inner]
    data["stream"]["datasets"].append(inner)
    with pytest.raises(JobSpecError, match="recursion"):
        parse_job(fill_job(data, catalog("llama")))
