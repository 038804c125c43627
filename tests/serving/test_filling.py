"""Jobs as people write them, over the wire: a server fills in what is left out and says what it filled in."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from builders.jobs import changed
from disttrain.v1 import data_service_pb2 as pb
from jobs.written import readme_job
from serving.harness import TIMEOUT_S, Running, index, reason_of, running
from shards import write_pairs
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dataserver.assembly import load_tokenizer
from dataserver.dataset import Dataset, Quarantine, count_tokens
from dataserver.planning.job.fields.text import parse_json
from dataserver.planning.job.identity import canonical_json, parse_job

CODE = grpc.StatusCode
ENTRY = ("stream", "datasets", 0)
TOKENIZER = ("stream", "tokenizer")


@pytest.fixture(scope="module")
def laion(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The configuration of a server for the README's job."""
    root = tmp_path_factory.mktemp("laion")
    folder, file = index(write_pairs(root / "laion", 60, 20, median_size=400)), root / "tokenizer.json"
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel()
    model.train_from_iterator(["a photo of the old red boat"], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model.save(str(file))
    count_tokens(folder, load_tokenizer("llama", file))
    keys = Dataset.open(folder).shards[0].keys()
    Quarantine.from_samples([("00000.tar", keys[0])]).save(root / "list")
    return {"datasets": {"laion": folder}, "tokenizers": {"llama": file}, "quarantine": root / "list"}


@pytest.fixture(scope="module")
def server(laion: dict[str, Any]) -> Iterator[Running]:
    with running(laion["datasets"], tokenizers=laion["tokenizers"]) as found:
        yield found


def create(server: Running, data: Any) -> pb.GetOrCreateJobResponse:
    """What a server answers to a job as it is."""
    text = data if isinstance(data, str) else json.dumps(data)
    request = pb.GetOrCreateJobRequest(job_spec_json=text)
    response: pb.GetOrCreateJobResponse = server.stub.GetOrCreateJob(request, timeout=TIMEOUT_S)
    return response


def put(data: Any, pointer: str, value: Any) -> None:
    """Set what a JSON pointer names (RFC 6901)."""
    *parents, last = pointer.split("/")[1:]
    for part in parents:
        data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
    data[last] = value


def test_the_readme_job_is_accepted_as_it_is_written(server: Running) -> None:
    answer = create(server, readme_job())
    complete = parse_json(answer.canonical_job_spec_json)
    job = parse_job(complete)
    assert (answer.job_id, answer.stream_id) == (job.job_id, job.stream_id)
    assert canonical_json(job.spec).decode() == answer.canonical_job_spec_json
    assert job.stream.datasets[0].fingerprint == server.catalog.datasets["laion"].fingerprint
    assert job.stream.tokenizer.digest == server.catalog.tokenizers["llama"].digest
    received = server.read(answer.job_id, "backbone", 7)
    assert received.end is not None
    assert received.microbatches

    written = readme_job()
    for field in answer.filled:
        put(written, field.path, json.loads(field.value_json))
    assert parse_job(written) == job, "the answer lists all that was filled in"
    assert len(answer.filled) == 2 + 8


def test_a_complete_job_is_answered_with_itself(server: Running) -> None:
    first = create(server, readme_job())
    again = create(server, first.canonical_job_spec_json)
    assert list(again.filled) == []
    assert (again.job_id, again.canonical_job_spec_json) == (first.job_id, first.canonical_job_spec_json)


def test_servers_that_would_fill_in_differently_serve_the_complete_job_alike(
    server: Running, laion: dict[str, Any]
) -> None:
    here = create(server, readme_job())
    lists = {"laion": laion["quarantine"]}
    with running(laion["datasets"], tokenizers=laion["tokenizers"], quarantines=lists) as other:
        there = create(other, readme_job())
        assert there.stream_id != here.stream_id, "which is why a run fills in once"
        assert create(other, here.canonical_job_spec_json).job_id == here.job_id
        for rank in range(8):
            ours = server.read(here.job_id, "backbone", rank).blob()
            assert other.read(here.job_id, "backbone", rank).blob() == ours
        with pytest.raises(grpc.RpcError) as caught:
            create(server, there.canonical_job_spec_json)
        assert reason_of(caught.value)[1] == "DATASET_MISMATCH"


@pytest.mark.parametrize(
    ("path", "value", "code", "reason", "message"),
    [
        ((*ENTRY, "name"), "coyo", CODE.NOT_FOUND, "DATASET_UNKNOWN", "'coyo', there are ['laion']: correct the name"),
        ((*ENTRY, "name"), "../laion", CODE.INVALID_ARGUMENT, "JOB_INVALID", 'name: found "../laion"'),
        ((*TOKENIZER, "name"), "\u00fc", CODE.INVALID_ARGUMENT, "JOB_INVALID", "tokenizer.name: found"),
        ((*ENTRY, "fingerprint"), "0" * 64, CODE.FAILED_PRECONDITION, "DATASET_MISMATCH", "leave fingerprint out"),
        ((*ENTRY, "quarantine"), "0" * 64, CODE.FAILED_PRECONDITION, "DATASET_MISMATCH", "--quarantine laion=FILE"),
        (
            TOKENIZER,
            {},
            CODE.INVALID_ARGUMENT,
            "JOB_INVALID",
            "there are ['llama', 'bytes']: set stream",
        ),
        (TOKENIZER, {"name": "gpt"}, CODE.NOT_FOUND, "TOKENIZER_UNKNOWN", "there are ['bytes', 'llama']: correct"),
        ((*TOKENIZER, "digest"), "0" * 64, CODE.FAILED_PRECONDITION, "TOKENIZER_MISMATCH", "leave digest out"),
        ((*TOKENIZER, "vocab_size"), 20, CODE.INVALID_ARGUMENT, "JOB_INVALID", "tokenizer.vocab_size is 20; with the"),
        (
            (*TOKENIZER, "vocab_size"),
            "400",
            CODE.INVALID_ARGUMENT,
            "JOB_INVALID",
            'found "400"; it should be',
        ),
        (
            ("execution", "layout"),
            {"kind": "ring"},
            CODE.FAILED_PRECONDITION,
            "JOB_UNSUPPORTED",
            'kind is "ring"; one of',
        ),
    ],
)
def test_what_does_not_fit_is_one_clear_error(
    server: Running, path: tuple[Any, ...], value: Any, code: grpc.StatusCode, reason: str, message: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        create(server, changed(readme_job(), path, value))
    found = reason_of(caught.value)
    assert found[:2] == (code, reason)
    assert message in found[3]
