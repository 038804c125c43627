"""A server's memory, threads and descriptors stay what they are, however many jobs, streams and odd requests come."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import psutil
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from faults.processes import Member
from fuzz.requests import METHODS, TIMEOUT_S, Request, changed_requests, problem
from fuzz.search import ROUND
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.harness import index, job_data, reason_of
from shards import write_pairs
from soak.usage import Server

from dataserver.cli.warm import warm_up

MIB = 1 << 20
PLACES = 16
SPARE_MIB = 24
"""What the memory may differ by chance: arenas of the allocator, buffers that are kept for reuse, streams that were
cancelled and still prepare. Over 60,000 odd requests it went up and down by as much as 17 MiB, and did not grow."""
SPARE_THREADS = 2 * PLACES + 32
"""Pools make their threads as they need them: one for each place, each idle stream, and each of 32 other calls."""
SPARE_FILES = 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    warm_up()  # a server that compiles in the background grows by what the compiler takes
    folder, log = index(write_pairs(tmp_path / "pairs", 48, 6, seed=1, median_size=160)), tmp_path / "log"
    flags = {
        "max-streams": PLACES,
        "idle-timeout-s": 1,
        "prefetch-bytes": 16 * MIB,
        "job-bytes": 64 * MIB,
    }
    options = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    with closing(Member(["--dataset", f"pairs={folder}", *options], log)) as server:
        yield Server(psutil.Process(server.process.pid), server.address)
        assert "Traceback" not in log.read_text()
        server.drain()
        assert server.wait() == 0


def text(seed: int = 0, **changes: Any) -> str:
    return json.dumps(job_data(datasets=[{"name": "pairs"}], seed=seed, end={"steps": 2}, **changes))


def create(stub: DataServiceStub, seed: int = 0, **changes: Any) -> str:
    request = pb.GetOrCreateJobRequest(job_spec_json=text(seed, **changes))
    return stub.GetOrCreateJob(request, timeout=TIMEOUT_S).job_id


def jobs(server: Server, numbers: range) -> None:
    """Another job each time; of some, a plan."""
    with server.connect() as channel:
        stub = DataServiceStub(channel)
        for seed in numbers:
            job_id = create(stub, seed)
            if seed % 8 == 0:
                stub.GetPlan(pb.GetPlanRequest(job_id=job_id), timeout=TIMEOUT_S)


def unread_streams(server: Server, numbers: range) -> None:
    """Streams that one message is read of, some cancelled, most forgotten, until the server has places no more."""
    with server.connect() as channel:
        stub, held = DataServiceStub(channel), []
        job_id = create(stub, microbatch=4, sizing={"max_patches": 1024})
        for number in numbers:
            stream = first = None
            while first is None:
                stream = stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id=job_id, module="vit"))
                first = message_of(stream)
            if number % 4 == 0:
                stream.cancel()
            else:
                held.append(stream)
        for stream in held:
            stream.cancel()


def message_of(stream: Any) -> Any:
    """The first message; None if the server has no place."""
    try:
        return next(stream)
    except grpc.RpcError as error:
        if reason_of(error)[1] != "TOO_MANY_STREAMS":
            raise
        return None


def odd_requests(server: Server, numbers: range) -> None:
    """Requests with fields out of range, bytes harmed, or given up before they are answered."""
    with server.connect() as channel:
        job_id = create(DataServiceStub(channel))
        known = {
            "GetOrCreateJob": pb.GetOrCreateJobRequest(job_spec_json=text()),
            "StreamMicrobatches": pb.StreamMicrobatchesRequest(job_id=job_id, module="vit"),
            "GetPlan": pb.GetPlanRequest(job_id=job_id),
        }
        seeds = [
            Request(name, known[method.name].SerializeToString() if method.name in known else b"")
            for name, method in METHODS.items()
        ]

        @hypothesis.seed(numbers.start)
        @settings(ROUND, max_examples=len(numbers))
        @given(changed_requests(seeds), st.integers(0, 9))
        def send(request: Request, draw: int) -> None:
            if draw == 0:
                channel.unary_unary(f"/{request.method}").future(request.body, timeout=TIMEOUT_S).cancel()
            else:
                assert problem(channel, request) is None

        send()


@pytest.mark.parametrize("size", [pytest.param(10, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("load", "times", "each_kib"),
    [
        pytest.param(jobs, 10_000, 10, marks=pytest.mark.long),
        (unread_streams, 2_000, 120),
        pytest.param(odd_requests, 20_000, 12, marks=pytest.mark.long),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_server_stays_as_large_as_it_was(
    server: Server, load: Callable[[Server, range], None], times: int, each_kib: int, size: int
) -> None:
    """Where few come, each may leave so many KiB: a job once left 20, which is less than may differ by chance."""
    count = times // size
    warm = count * 3 // 4  # until then what is cached of odd requests, and some 650 jobs, fills its bounds
    load(server, range(warm))
    before = server.at_rest()
    load(server, range(warm, warm + count))
    spare = min(SPARE_MIB * MIB, count * each_kib << 10)
    after = server.settled(before.files + SPARE_FILES, before.rss + spare)
    assert after.rss - before.rss < spare
    assert after.threads - before.threads <= SPARE_THREADS
    assert after.files - before.files <= SPARE_FILES
