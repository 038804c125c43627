"""Whatever is sent to a server: an answer, or an error that says what to do; and it serves on."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from builders.authority import TOKENS, token_file
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from disttrain.v1.peer_service_pb2 import FetchPiecesRequest, FetchPlanRequest, ObjectPieces
from faults.processes import Member
from fuzz.requests import METHODS, TIMEOUT_S, Request, changed_requests, problem, problem_of
from fuzz.search import Search, recorded
from serving.harness import index, job_data
from shards import write_pairs

from dataserver.fleet.build import build_id
from dataserver.security import Channels

TARGET = "requests"


@dataclass
class Target:
    """A server in another process, and a job that it knows."""

    server: Member
    channel: grpc.Channel
    job_text: str
    read: int = 0
    """Characters of the log that earlier requests wrote."""

    def attempt(self, request: Request) -> None:
        """Send a request; raises what is wrong with the answer, or the log, and has a server again that serves."""
        wrong = problem(self.channel, request)
        log = self.server.log.read_text()[self.read :]
        self.read += len(log)
        if self.server.process.poll() is not None:
            self.server.start()
            self.digest()
        assert wrong is None
        assert "Traceback" not in log, log

    def digest(self) -> str:
        """Of a stream of the job, which the server may have forgotten meanwhile."""
        stub = DataServiceStub(self.channel)
        job = stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=self.job_text), timeout=TIMEOUT_S)
        request = pb.StreamMicrobatchesRequest(job_id=job.job_id, module="vit")
        messages = stub.StreamMicrobatches(request, timeout=TIMEOUT_S)
        return hashlib.sha256(b"".join(m.SerializeToString() for m in messages)).hexdigest()

    def seeds(self) -> list[Request]:
        """A valid request of each method."""
        stub = DataServiceStub(self.channel)
        job = stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=self.job_text), timeout=TIMEOUT_S)
        times = pb.StepTimes(job_id=job.job_id, module="llm", stage=1, forward_ns=[5, 6], backward_ns=[7])
        known = {
            "GetOrCreateJob": pb.GetOrCreateJobRequest(job_spec_json=job.canonical_job_spec_json),
            "StreamMicrobatches": pb.StreamMicrobatchesRequest(job_id=job.job_id, module="llm", tensors=["labels"]),
            "GetPlan": pb.GetPlanRequest(job_id=job.job_id, step=1),
            "ReportStepTimes": pb.ReportStepTimesRequest(times=times),
            "ListStepTimes": pb.ListStepTimesRequest(job_id=job.job_id),
            "FetchPieces": FetchPiecesRequest(objects=[ObjectPieces(object=bytes(32), start=[0], length=[1])]),
            "FetchPlan": FetchPlanRequest(job_id=job.job_id, step=1, build=build_id()),
            "DescribeSamples": pb.DescribeSamplesRequest(dataset="pairs", samples=[0, 1]),
        }
        return [
            Request(name, known[method.name].SerializeToString() if method.name in known else b"")
            for name, method in METHODS.items()
        ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server of a small dataset. In the end its log holds no traceback, and it ends when it is told to."""
    root = tmp_path_factory.mktemp("fuzz")
    folder, log = index(write_pairs(root / "pairs", 24, 12, seed=1)), root / "log"
    with closing(Member(["--dataset", f"pairs={folder}"], log)) as server:
        with grpc.insecure_channel(server.address) as channel:
            text = json.dumps(job_data(datasets=[{"name": "pairs"}], end={"steps": 2}))
            target = Target(server, channel, text)
            digest = target.digest()
            yield target
            assert target.digest() == digest, "the server serves what it served before"
        assert "Traceback" not in log.read_text()
        server.drain()
        assert server.wait() == 0


@pytest.mark.parametrize("path", recorded(TARGET), ids=lambda path: path.name)
def test_kept_requests(target: Target, path: Path) -> None:
    target.attempt(Request.of(path.read_bytes()))


@pytest.mark.slow
def test_no_request_is_answered_by_a_defect(target: Target, search: Search) -> None:
    seeds = target.seeds()
    for seed in seeds:
        target.attempt(seed)
    assert search.run(TARGET, changed_requests(seeds), target.attempt) > 0


PARTS = 10
PART = 100_000
"""Requests of each part: a million in all."""
IN_FLIGHT = 64


@dataclass
class Guarded:
    """A server that asks for tokens, with a channel that brings one and a channel that does not."""

    target: Target
    strangers: grpc.Channel
    seeds: list[Request]
    served: str
    """Digest of what it serves."""

    def problems(self, requests: list[Request]) -> list[tuple[Request, str]]:
        """Send requests, in turn with and without a token; those whose answers are wrong, each with what is wrong."""
        calls = [
            _sent(self.strangers if number % 2 else self.target.channel, request)
            for number, request in enumerate(requests)
        ]
        found = list[tuple[Request, str]]()
        for number, (request, call) in enumerate(zip(requests, calls, strict=True)):
            code, wrong = call.code(), None
            if (number % 2 == 1) != (code is grpc.StatusCode.UNAUTHENTICATED):
                wrong = f"{code} {'without' if number % 2 else 'with'} a token: {call.details()}"
            elif code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):  # left behind its first message
                wrong = problem_of(call, request)
            if wrong is not None:
                found.append((request, wrong))
        return found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """One server for all parts. In the end its log holds no traceback, and it ends when it is told to."""
    root = tmp_path_factory.mktemp("guarded")
    folder, log = index(write_pairs(root / "pairs", 24, 12, seed=1)), root / "log"
    arguments = ["--dataset", f"pairs={folder}", "--token-file", token_file(root, "alice")]
    with closing(Member(arguments, log)) as server:
        with (
            Channels(token=lambda: TOKENS["alice"]).open(server.address) as channel,
            grpc.insecure_channel(server.address) as strangers,
        ):
            text = json.dumps(job_data(datasets=[{"name": "pairs"}], end={"steps": 2}))
            target = Target(server, channel, text)
            yield Guarded(target, strangers, target.seeds(), target.digest())
        assert "Traceback" not in log.read_text()
        server.drain()
        assert server.wait() == 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_million_requests_of_callers_known_and_unknown(guarded: Guarded, search: Search, part: int) -> None:
    """Strangers get UNAUTHENTICATED and nothing else, whatever they send; others an answer, or what to do."""
    draw = Random(part)
    for _ in range(0, PART, IN_FLIGHT):
        seeds = draw.choices(guarded.seeds, k=IN_FLIGHT)
        found = guarded.problems([Request(seed.method, _harmed(seed.body, draw)) for seed in seeds])
        for request, _ in found:
            search.keep(TARGET, bytes(request))
        assert not found
    assert guarded.target.digest() == guarded.served


def _sent(channel: grpc.Channel, request: Request) -> Any:
    """A call under way; of a stream, its status is that behind its last message, or CANCELLED behind its first."""
    if not METHODS[request.method].server_streaming:
        return channel.unary_unary(f"/{request.method}").future(request.body, timeout=TIMEOUT_S)
    call = channel.unary_stream(f"/{request.method}")(request.body, timeout=TIMEOUT_S)
    with suppress(grpc.RpcError):
        next(iter(call))
        call.cancel()
    return call


def _harmed(body: bytes, draw: Random) -> bytes:
    """Bytes with a few of them changed, cut off, repeated or put in."""
    found = bytearray(body)
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(found) + 1)
        end = min(len(found), at + draw.choice((1, 2, 8, 64)))
        found[at:end] = draw.choice((b"", draw.randbytes(end - at), bytes(found[at:end]) * 2, draw.randbytes(9)))
    return bytes(found)
