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
from fuzz.requests import METHODS, TIMEOUT_S, Request, changed_requests, problem
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


MILLION = 1_000_000
IN_FLIGHT = 64


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_million_requests_of_callers_known_and_unknown(tmp_path: Path) -> None:
    """Of a server that asks for tokens: strangers get UNAUTHENTICATED and nothing else, whatever they send."""
    folder, draw = index(write_pairs(tmp_path / "pairs", 24, 12, seed=1)), Random(7)
    log, tokens = tmp_path / "log", token_file(tmp_path, "alice")
    with closing(Member(["--dataset", f"pairs={folder}", "--token-file", tokens], log)) as server:
        with Channels(token=lambda: TOKENS["alice"]).open(server.address) as channel:
            text = json.dumps(job_data(datasets=[{"name": "pairs"}], end={"steps": 2}))
            target = Target(server, channel, text)
            digest, seeds = target.digest(), target.seeds()
            with grpc.insecure_channel(server.address) as strangers:
                for start in range(0, MILLION, IN_FLIGHT):
                    calls = []
                    for number in range(start, start + IN_FLIGHT):
                        seed = draw.choice(seeds)
                        known = number % 2 == 0
                        call = _sent(channel if known else strangers, Request(seed.method, _harmed(seed.body, draw)))
                        calls.append((known, call))
                    for known, call in calls:
                        code = call.code()
                        expected = code is grpc.StatusCode.UNAUTHENTICATED
                        assert known != expected, (known, code)
                        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), call.details()
            assert target.digest() == digest
        assert "Traceback" not in log.read_text()
        server.drain()
        assert server.wait() == 0


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
