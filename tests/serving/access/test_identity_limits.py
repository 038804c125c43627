"""What one identity may have at once, and how fast."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from builders.authority import TOKENS, write
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from fleet.servers import until
from serving.access.conftest import Serve
from serving.harness import FIXED_WINDOW, TIMEOUT_S, job_data, reason_of, receive

from dataserver.security import Channels
from dataserver.serving.access import ByteRate, ByteRates


def limited(policy: Path, **limits: int) -> None:
    identities = [{"name": name, "token": name, "datasets": ["*"], **limits} for name in ("alice", "bob")]
    write(policy, yaml.safe_dump({"identities": identities}).encode())


def test_streams_and_jobs_of_one_identity_are_bounded_and_those_of_others_are_not(
    serve: Serve, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limited(policy, streams=3, jobs=2)
    server = serve()
    opened: list[Any] = []
    with (
        Channels(token=lambda: TOKENS["alice"]).open(server.address, FIXED_WINDOW) as alices,
        Channels(token=lambda: TOKENS["bob"]).open(server.address, FIXED_WINDOW) as bobs,
    ):
        alice, bob = DataServiceStub(alices), DataServiceStub(bobs)
        texts = [json.dumps(job_data(seq_len=size, end={"steps": 1000})) for size in (512, 576, 640)]
        jobs = [
            alice.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=t), timeout=TIMEOUT_S).job_id for t in texts
        ]

        def stream(stub: DataServiceStub, job: str, rank: int = 0) -> Any:
            opened.append(stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id=job, module="vit", rank=rank)))
            assert receive(opened[-1], 1).microbatches
            return opened[-1]

        def refused(stub: DataServiceStub, job: str) -> str:
            with pytest.raises(grpc.RpcError) as caught:
                stream(stub, job)
            assert reason_of(caught.value)[:3] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "IDENTITY_LIMIT", "RETRY")
            return reason_of(caught.value)[3]

        stream(alice, jobs[0])
        first = stream(alice, jobs[1])
        assert "alice has 2 jobs with open streams at this server" in refused(alice, jobs[2])
        stream(alice, jobs[0], 1)
        assert "alice has 3 streams open at this server" in refused(alice, jobs[0])
        lines = [one.getMessage() for one in caplog.records if one.name == "dataserver.audit"]
        assert [line.partition(" at ")[0] for line in lines] == ["refused StreamMicrobatches of alice"] * 2
        assert ["jobs with open streams" in line for line in lines] == [True, False]
        stream(bob, jobs[2])
        first.cancel()
        until(lambda: len(server.server.streams.progress()) == 3)
        stream(alice, jobs[2])
        for one in opened:
            one.cancel()


def test_what_was_sent_delays_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr("dataserver.serving.access.rates.monotonic", lambda: now[0])
    rates = ByteRates()
    rate = rates.of("a", 1000)
    assert rate is not None
    assert rate.delay_s() <= 0
    rate.spend(2500)
    assert rate.delay_s() == pytest.approx(2.5)
    now[0] += 1
    rate.spend(500)
    assert rate.delay_s() == pytest.approx(2.0)
    now[0] += 60
    rate.spend(100)
    assert rate.delay_s() == pytest.approx(0.1), "time that was not used is not saved up"
    assert rates.of("a", 1000) is rate
    assert rates.of("b", 1000) is not rate
    assert rates.of("a", None) is None
    changed = rates.of("a", 2000)
    assert changed is not None
    assert changed.delay_s() <= 0


def test_the_rate_holds_across_all_streams_of_an_identity(
    serve: Serve, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of every stream is counted once, and a stream whose rate is used up ends in order in a drain."""
    limited(policy, bytes_per_s=1 << 40)
    spent: list[int] = []
    counted = ByteRate.spend
    monkeypatch.setattr(ByteRate, "spend", lambda rate, n: (spent.append(n), counted(rate, n)))
    server = serve()
    with Channels(token=lambda: TOKENS["alice"]).open(server.address) as channel:
        stub = DataServiceStub(channel)
        text = json.dumps(job_data(end={"steps": 2}))
        job_id = stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S).job_id
        found = [
            receive(stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id=job_id, module="vit", rank=rank)))
            for rank in (0, 1)
        ]
        assert len(spent) == sum(len(stream.microbatches) for stream in found)
        assert sum(spent) >= sum(len(body) for stream in found for _, body in stream.microbatches)
        monkeypatch.setattr(ByteRate, "delay_s", lambda _: 1e9)
        stream = stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id=job_id, module="vit"))
        until(lambda: server.server.streams.progress())
        server.server.drain(TIMEOUT_S)
        assert receive(stream).end.reason == pb.EndOfStream.REASON_DRAINING
