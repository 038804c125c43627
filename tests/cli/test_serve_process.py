import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from cli.server_process import TIMEOUT_S, ServerProcess, command, serving
from disttrain.v1 import admin_service_pb2
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from disttrain.v1.data_service_pb2 import EndOfStream
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from serving.harness import FIXED_WINDOW, index, job_data, reason_of, receive
from shards import write_pairs

from dataserver.addresses import split_address
from dataserver.jobs import Catalog, fill_job
from dataserver.serving.config import load_config

FILES = 256
"""Descriptors of a server. Connections may take half of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("served") / "d", 24, 8))


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("--dataset", f"d={folder}", by_hand=True) as found:
        yield found


def create(stub: DataServiceStub, folder: Path, steps: int) -> str:
    catalog = Catalog.open(load_config(None, {"datasets": {"d": folder}}))
    text = json.dumps(fill_job(job_data(datasets=[{"name": "d"}], end={"steps": steps}), catalog))
    return stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S).job_id


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_success(server: ServerProcess, folder: Path, number: int) -> None:
    with grpc.insecure_channel(server.address, FIXED_WINDOW) as channel:
        stub = DataServiceStub(channel)
        job_id = create(stub, folder, 100_000)
        stream = stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id=job_id, module="vit"), timeout=TIMEOUT_S)
        receive(stream, 2)
        server.process.send_signal(number)
        found = receive(stream)
        assert found.end is not None
        assert found.end.reason == EndOfStream.REASON_DRAINING
    code, errors = server.process.wait(TIMEOUT_S), server.process.stderr
    assert code == 0
    assert errors is not None
    assert "Traceback" not in errors.read()


def test_a_server_may_open_as_many_files_as_the_system_lets_it(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        with serving("--dataset", f"d={folder}", by_hand=True) as server:
            limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert limits == (before[1], before[1])
    assert before[1] > 512


def test_without_descriptors_a_stream_ends_with_a_reason(server: ServerProcess) -> None:
    """Nothing can be loaded then: not even what errors are made of."""
    with grpc.insecure_channel(server.address, FIXED_WINDOW) as channel:
        stub = DataServiceStub(channel)
        stub.GetDatasetInfo(pb.GetDatasetInfoRequest(), timeout=TIMEOUT_S)
        _, most = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (1, most))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id="unknown"), timeout=TIMEOUT_S))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (most, most))
    assert reason_of(caught.value)[:3] == (grpc.StatusCode.NOT_FOUND, "JOB_UNKNOWN", "CREATE_JOB")


def test_idle_connections_of_strangers_leave_descriptors_for_streams(folder: Path) -> None:
    """The server closes those beyond half of its descriptors."""
    line = shlex.join(command("serve", "--listen", "127.0.0.1:0", "--dataset", f"d={folder}"))
    limited = ["bash", "-c", f"ulimit -n {FILES}; exec {line}"]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(limited, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        stub = DataServiceStub(stack.enter_context(grpc.insecure_channel(address, FIXED_WINDOW)))
        job_id = create(stub, folder, 3)
        where = split_address(address)
        strangers = [stack.enter_context(socket.create_connection(where, TIMEOUT_S)) for _ in range(2 * FILES)]
        read_to_end(strangers[-1])
        assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < FILES * 3 // 4
        request = pb.StreamMicrobatchesRequest(job_id=job_id, module="vit")
        assert receive(stub.StreamMicrobatches(request, timeout=TIMEOUT_S)).end is not None


def read_to_end(connection: socket.socket) -> None:
    """Read until the other side has closed a connection; a timeout where it does not."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


def test_the_line_that_says_where_it_listens_is_written_at_once(folder: Path) -> None:
    """Else lines of the log come between where both go to one file."""
    reads, writes = os.pipe2(os.O_DIRECT)  # a read gives what one write wrote
    line = command("serve", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--dataset", f"d={folder}")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(line, stdout=writes, env=environment) as process:
        try:
            os.close(writes)
            assert re.fullmatch(rb"listening on 127\.0\.0\.1:\d+\n", os.read(reads, 4096))
            assert re.fullmatch(rb"metrics on http://127\.0\.0\.1:\d+/metrics\n", os.read(reads, 4096))
        finally:
            process.kill()
            os.close(reads)


def test_an_idle_server_ends_at_once(server: ServerProcess) -> None:
    code, errors = server.end()
    assert code == 0
    assert "Traceback" not in errors


def test_a_second_signal_cuts_streams_off(folder: Path) -> None:
    with (
        serving("--dataset", f"d={folder}", "--drain-grace-s", "3600") as server,
        grpc.insecure_channel(server.address, FIXED_WINDOW) as channel,
    ):
        stub = DataServiceStub(channel)
        job_id = create(stub, folder, 100_000)
        stream = stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id=job_id, module="vit"), timeout=TIMEOUT_S)
        next(stream)
        AdminServiceStub(channel).Drain(admin_service_pb2.DrainRequest(), timeout=TIMEOUT_S)
        server.process.send_signal(signal.SIGTERM)
        code, _ = server.end(signal.SIGINT)  # signals of one kind may be delivered as one
        assert code == 0


def test_a_drain_ends_the_process(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        AdminServiceStub(channel).Drain(admin_service_pb2.DrainRequest(), timeout=TIMEOUT_S)
    assert server.process.wait(TIMEOUT_S) == 0


def test_two_processes_and_a_killed_one_give_the_same_bytes(folder: Path) -> None:
    with serving("--dataset", f"d={folder}") as one, serving("--dataset", f"d={folder}") as other:
        with grpc.insecure_channel(one.address) as first, grpc.insecure_channel(other.address) as second:
            stubs = DataServiceStub(first), DataServiceStub(second)
            job_id = create(stubs[0], folder, 4)
            assert create(stubs[1], folder, 4) == job_id
            request = pb.StreamMicrobatchesRequest(job_id=job_id, module="vit", rank=1)
            whole = receive(stubs[0].StreamMicrobatches(request, timeout=TIMEOUT_S))
            part = receive(stubs[0].StreamMicrobatches(request, timeout=TIMEOUT_S), 3)
            one.process.kill()
            one.process.wait(TIMEOUT_S)
            last = part.microbatches[-1][0]
            request.start_step, request.start_microbatch = last.step, last.microbatch
            rest = receive(stubs[1].StreamMicrobatches(request, timeout=TIMEOUT_S))
        assert part.blob()[:-1] + rest.blob() == whole.blob()


def test_a_client_that_pings_often_is_not_cut_off(server: ServerProcess, folder: Path) -> None:
    options = (("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_permit_without_calls", 1), *FIXED_WINDOW)
    with grpc.insecure_channel(server.address, options) as channel:
        stub = DataServiceStub(channel)
        job_id = create(stub, folder, 100_000)
        stream = stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id=job_id, module="vit"), timeout=TIMEOUT_S)
        next(stream)
        with pytest.raises(grpc.FutureTimeoutError):
            stream.result(timeout=6)  # a default server ends such a call after about four seconds
        assert stream.is_active()
        stream.cancel()


def test_the_address_of_the_metrics_is_printed(folder: Path) -> None:
    with serving("--dataset", f"d={folder}", "--metrics-listen", "127.0.0.1:0") as server:
        assert server.process.stdout is not None
        line = server.process.stdout.readline()
        address = re.fullmatch(r"metrics on (http://127\.0\.0\.1:\d+/metrics)\n", line)
        assert address, line
        with urlopen(address[1], timeout=TIMEOUT_S) as answer:
            assert b"\ndisttrain_open_streams 0.0\n" in answer.read()
        code, errors = server.end()
    assert code == 0
    assert "Traceback" not in errors
