"""Jobs that need statistics first: a server says so and goes on, and ranks go where nothing is missing."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from disttrain.v1 import data_service_pb2 as pb
from serving.harness import TIMEOUT_S, Running, index, job_data, reason_of, running
from shards import write_pairs

from dataserver.jobs import shard_statistics
from dataserver.planning.job.identity import parse_job
from dataserver.planning.stream.statistics import ShardStatistics
from dataserver.serving import registry
from trainclient.stream.fleet import Fleet
from trainclient.stream.follower import ViewRequest
from trainclient.stream.reader import MicrobatchReader

FILTERED = [{"name": "pairs", "filter": "width >= 16"}]


class Slow:
    """Computing goes on while `go` is set, and is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.computed = 0
        original = shard_statistics.row_statistics

        def held(*arguments: Any) -> ShardStatistics:
            self.begun.set()
            assert self.go.wait(TIMEOUT_S)
            self.computed += 1
            return original(*arguments)

        monkeypatch.setattr(shard_statistics, "row_statistics", held)
        monkeypatch.setattr(registry, "PATIENCE_S", 0.3)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found = Slow(monkeypatch)
    yield found
    found.go.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("pairs"), num_samples=40, shard_size=8))


def refused(server: Running) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        server.create(job_data(datasets=FILTERED))
    code, reason, action, text = reason_of(caught.value)
    assert (code, reason, action) == (grpc.StatusCode.UNAVAILABLE, "STATISTICS_PENDING", "RETRY")
    return text


def created(server: Running, data: dict[str, Any]) -> pb.GetOrCreateJobResponse:
    """Ask again while statistics are computed, as clients do: on a busy machine that takes longer than a call waits."""
    while True:
        try:
            return server.create(data)
        except grpc.RpcError as error:
            if reason_of(error)[1] != "STATISTICS_PENDING":
                raise


def test_a_server_says_how_far_it_is_and_goes_on(folder: Path, slow: Slow) -> None:
    with running({"pairs": folder}) as server:
        assert "the statistics of 0 of 5 shards are computed, which a new filter" in refused(server)
        assert "ask again" in refused(server)
        slow.go.set()
        response = created(server, job_data(datasets=FILTERED))
        assert response.num_steps == 4
        assert slow.computed == 5
        assert server.create(job_data(datasets=FILTERED, seed=1)).job_id != response.job_id
        assert slow.computed == 5, "another job with the same filter takes the same statistics"


def test_a_client_waits_for_statistics_and_says_so(folder: Path, slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainclient")
    with running({"pairs": folder}) as server:
        fleet = Fleet(server.address)
        request = pb.GetOrCreateJobRequest(job_spec_json=json.dumps(job_data(datasets=FILTERED)))
        found: list[pb.GetOrCreateJobResponse] = []
        caller = threading.Thread(target=lambda: found.append(fleet.call(lambda stub: stub.GetOrCreateJob, request)))
        caller.start()
        assert slow.begun.wait(TIMEOUT_S)
        while "answered STATISTICS_PENDING: the statistics of 0 of 5 shards are computed" not in caplog.text:
            assert caller.is_alive()
            caller.join(0.05)
        slow.go.set()
        caller.join(TIMEOUT_S)
        fleet.close()
        assert [response.num_steps for response in found] == [4]


def test_a_rank_that_fails_over_goes_on_where_the_job_is_known(folder: Path, slow: Slow) -> None:
    """Of three servers one dies, one does not know the job and has no statistics, and one knows it."""
    with running({"pairs": folder}) as knows, running({"pairs": folder}) as knows_nothing:
        slow.go.set()
        job = json.loads(created(knows, job_data(datasets=FILTERED)).canonical_job_spec_json)
        with running({"pairs": folder}) as dies:
            created(dies, job)
            slow.go.clear()
            addresses = [server.address for server in (dies, knows_nothing, knows)]
            for first in range(3):
                assert first_step(addresses, first, job) == 0
        for first in range(3):
            assert first_step(addresses, first, job) == 0
        assert not slow.go.is_set(), "nobody waited for the statistics"
        slow.go.set()


def first_step(addresses: list[str], first: int, job: Any) -> int:
    """The step of the first microbatch that a rank gets which asks one of the servers first."""
    fleet = Fleet(addresses)
    fleet.current = first
    with MicrobatchReader(fleet, parse_job(job), ViewRequest("llm", 0), num_steps=4) as reader:
        step = next(iter(reader)).step
    fleet.close()
    return step
