"""What failed is remembered by shard and key, for those who may read the dataset."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from disttrain.v1 import admin_service_pb2 as pb
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from serving.harness import index, job_data, running
from shards import break_images, write_pairs

from dataserver.assembly import UnreadableError
from dataserver.assembly.decoding import read_images
from dataserver.dataset import Dataset, ShardReadError
from dataserver.serving.failures import MAX_CHARS, MAX_FAILURES, FailureKind, Failures
from dataserver.serving.stream.source import ViewSource


def listed(address_channel: Any) -> pb.ListFailuresResponse:
    found: pb.ListFailuresResponse = AdminServiceStub(address_channel).ListFailures(pb.ListFailuresRequest())
    return found


def test_invalid_images_and_unreadable_shards_are_named(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "d", 16, 16, seed=6))
    break_images(folder, (3, 0), (5, 0))
    shard = Dataset.open(folder).shards[0]
    data = job_data(datasets=[{"name": "d"}], end={"epochs": 1}, generation={"ratio": "0"})
    with running({"d": folder}) as server:
        assert not listed(server.channel).failures
        job = server.create(data)
        for rank in (0, 1):
            server.read(job.job_id, "vit", rank)
        found = listed(server.channel)
        cause = OSError(5, "Input/output error")
        served = next(iter(server.catalog.datasets.values()))
        with pytest.raises(UnreadableError) as caught:
            next(read_images((0, 0), Unreadable(cause), [], at_once=True))  # type: ignore[arg-type]
        source = ViewSource(SimpleNamespace(job=job_of("d"), datasets=[served]), "vit", 0, (), None)  # type: ignore[arg-type]
        source.note_unreadable(caught.value, server.server._metrics.failures)
        unreadable = listed(server.channel).failures[0]
    assert {(f.kind, f.dataset, f.shard, f.key, f.count) for f in found.failures} == {
        (pb.FAILURE_KIND_IMAGE, "d", shard.name, shard.keys()[row], 1) for row in (3, 5)
    }
    assert all("image 0 cannot be made from its stored bytes" in f.reason for f in found.failures)
    assert abs(found.failures[0].last.seconds - time.time()) < 600
    assert (unreadable.kind, unreadable.shard, unreadable.key) == (pb.FAILURE_KIND_READ, shard.name, "")
    assert unreadable.reason == "Input/output error"
    assert str(folder) not in str(unreadable)


def test_token_ids_that_cannot_be_had_are_named_by_sample(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "d", 16, 16, seed=6))
    data = job_data(datasets=[{"name": "d"}], end={"epochs": 1}, generation={"ratio": "0"})
    with running({"d": folder}) as server:
        job = server.create(data)
        shard = server.catalog.datasets["d"].shards[0]
        ids = shard.file.token_ids_path(server.catalog.tokenizers["bytes"].digest)
        good = ids.read_bytes()
        ids.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(grpc.RpcError, match="are not those that were counted"):
            server.read(job.job_id, "llm", 0)
        counted = listed(server.channel).failures
        ids.unlink()
        ids.mkdir()
        with pytest.raises(grpc.RpcError):
            server.read(job.job_id, "llm", 0)
        newest = listed(server.channel).failures[0]
    keys = shard.keys()
    # Microbatches that are prepared ahead may have met the same cause, each at a sample of its own.
    assert counted, "nothing was listed"
    for failure in (*counted, newest):
        assert (failure.kind, failure.dataset, failure.shard) == (pb.FAILURE_KIND_TEXT, "d", shard.name)
        assert failure.key in keys
        assert "count tokens again" in failure.reason
        assert str(folder) not in str(failure)
    assert all(failure.count == 1 for failure in counted), "a sample of one stream was counted twice"


class Unreadable:
    """A dataset whose storage fails."""

    def __init__(self, cause: OSError) -> None:
        self._cause = cause

    def read_all(self, _refs: Any) -> list[bytes]:
        raise ShardReadError("cannot read /secret/place") from self._cause


def job_of(name: str) -> Any:
    return SimpleNamespace(stream=SimpleNamespace(datasets=[SimpleNamespace(name=name)]))


def test_the_list_is_bounded_and_shows_what_the_caller_may_read(tmp_path: Path) -> None:
    dataset, failures = Dataset.open(index(write_pairs(tmp_path / "d", 16, 16, seed=6))), Failures()
    failures.note(FailureKind.READ, "other", dataset, 0, -1, "gone")
    for number in range(MAX_FAILURES):
        failures.note(FailureKind.IMAGE, f"d{number}", dataset, 0, number % 16, "x\n" * MAX_CHARS)
    failures.note(FailureKind.IMAGE, "d1", dataset, 0, 1, "again")
    assert failures.num_forgotten == 1, "the oldest, of the other dataset"
    assert not list(failures.listed({"other": dataset}))
    newest, *rest = failures.listed({f"d{number}": dataset for number in range(MAX_FAILURES)})
    assert (newest.dataset, newest.key, newest.count, newest.reason) == ("d1", dataset.shards[0].keys()[1], 2, "again")
    assert len(rest) == MAX_FAILURES - 1
    assert "\n" not in rest[0].reason
    assert len(rest[0].reason) < 2 * MAX_CHARS
