"""The client in JavaScript says how far its reader is."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cli.server_process import TIMEOUT_S, serving
from disttrain.v1.admin_service_pb2 import GetMetricsRequest, RankProgress
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from foreign import node
from foreign.conftest import Case

STEP = 3
READ = """
const fs = require('fs');
const pause = () => new Promise((resolve) => setTimeout(resolve, 20));
const data = new client.DataClient([value.address]);
return (async () => {
    await data.createJob(value.job);
    for await (const { header } of data.stream('vit', 1)) {
        while (Number(header.step) === value.step && !fs.existsSync(value.file)) await pause();
        if (fs.existsSync(value.file)) break;
    }
    data.close();
    return 'read';
})();
"""


@pytest.mark.usefixtures("javascript")
def test_a_server_learns_the_step_that_a_reader_in_javascript_took(case: Case, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with serving(*case.flags) as server, ThreadPoolExecutor(1) as pool:
        value = {"address": server.address, "job": json.loads(case.job.read_text()), "step": STEP, "file": str(seen)}
        reading = pool.submit(node.evaluate, READ, value)
        try:
            rank = progress_of(server.address)
        finally:
            seen.touch()
        assert reading.result() == "read"
    assert (rank.module, rank.rank, rank.step) == ("vit", 1, STEP)
    assert rank.waited.ToNanoseconds() > 0


def progress_of(address: str) -> RankProgress:
    """The one rank that reads, as soon as it has said its step."""
    until = time.monotonic() + TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        stub = AdminServiceStub(channel)
        while time.monotonic() < until:
            ranks = stub.GetMetrics(GetMetricsRequest(), timeout=TIMEOUT_S).ranks
            if ranks and ranks[0].HasField("step") and ranks[0].step == STEP:
                return ranks[0]
            time.sleep(0.05)
    raise AssertionError("no step was said")
