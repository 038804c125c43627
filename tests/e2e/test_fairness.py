"""One odd job stops nobody: a real server keeps serving an ordinary one."""

import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders.jobs import compose, module
from cli.server_process import serving
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from serving.harness import index
from shards import write_pairs

TIMEOUT_S = 60.0
BOUND_S = 10.0
"""Of a first microbatch beside odd jobs; it takes a tenth of a second, and took more than a hundred seconds."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("pairs"), num_samples=128, shard_size=32))


def created(stub: DataServiceStub, data: dict[str, Any]) -> str:
    return stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=json.dumps(data)), timeout=TIMEOUT_S).job_id


def opened(stub: DataServiceStub, job_id: str, step: int) -> Any:
    request = pb.StreamMicrobatchesRequest(job_id=job_id, module="vit", rank=0, start_step=step)
    return stub.StreamMicrobatches(request, timeout=10 * TIMEOUT_S)


def first_header(stub: DataServiceStub, job_id: str, step: int) -> float:
    """Seconds until a new stream's first header."""
    start = time.monotonic()
    stream = opened(stub, job_id, step)
    assert next(stream).header.step == step
    stream.cancel()
    return time.monotonic() - start


def ordinary(seq_len: int = 512) -> dict[str, Any]:
    return compose([module("encoder"), module("backbone", dp=2, pp=2)], seq_len=seq_len, global_batch=16)


def odd(seed: int) -> dict[str, Any]:
    modules = [module("encoder"), module("backbone", dp=4096)]
    return compose(modules, seq_len=512, global_batch=24_576, seed=seed, end={"steps": 1000})


@pytest.mark.slow
def test_streams_of_a_huge_job_that_are_opened_and_cancelled_stop_no_other_job(pairs: Path) -> None:
    with serving("--dataset", f"pairs={pairs}") as server, grpc.insecure_channel(server.address) as channel:
        stub = DataServiceStub(channel)
        neighbour = created(stub, ordinary())
        first_header(stub, neighbour, 0)  # compiles, where nothing is cached
        for round_, seed in enumerate((1, 2)):
            huge = created(stub, odd(seed))
            streams = [opened(stub, huge, step) for step in range(5)]
            time.sleep(1)
            waits = [first_header(stub, neighbour, 1 + 4 * round_), first_header(stub, neighbour, 2 + 4 * round_)]
            for stream in streams:
                stream.cancel()
            waits += [first_header(stub, neighbour, 3 + 4 * round_)]
            start = time.monotonic()
            created(stub, ordinary(600 + round_))
            waits.append(time.monotonic() - start)
            assert max(waits) < 2 * BOUND_S
        assert server.end()[0] == 0


@pytest.mark.slow
def test_a_call_whose_deadline_passed_is_planned_no_further(pairs: Path) -> None:
    with serving("--dataset", f"pairs={pairs}") as server, grpc.insecure_channel(server.address) as channel:
        stub = DataServiceStub(channel)
        huge, pid = created(stub, odd(3)), server.process.pid
        for step in (8, 9):  # what a first plan takes besides counts for nothing
            before = _ticks(pid)
            stub.GetPlan(pb.GetPlanRequest(job_id=huge, step=step), timeout=TIMEOUT_S)
        begun = _ticks(pid)
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetPlan(pb.GetPlanRequest(job_id=huge, step=0), timeout=0.1)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for stream in [opened(stub, huge, step) for step in range(5)]:
            stream.cancel()
        assert idle_within(pid, 2 * BOUND_S)
        assert _ticks(pid) - begun < 3 * (begun - before), "less than three of six plans"


def idle_within(pid: int, seconds: float) -> bool:
    """Whether a process soon takes next to no processor time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = _ticks(pid)
        time.sleep(1)
        if _ticks(pid) - before < 10:  # hundredths of a second
            return True
    return False


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
