"""Several processes serve one address as one server does: the same bytes, limits, numbers and end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cli.server_process import TIMEOUT_S, command
from disttrain.v1 import admin_service_pb2, data_service_pb2
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from prometheus_client.parser import text_string_to_metric_families
from serving.harness import FIXED_WINDOW, job_data, large_job, reason_of, receive, running
from serving.peers import until

from dataserver.dataset import usable_cores
from dataserver.serving.budgets import CORES_PER_WORKER
from dataserver.serving.config import ConfigError, load_config, number_of_workers
from dataserver.serving.places import Places
from dataserver.serving.siblings import summed
from dataserver.serving.workers import sibling_addresses, worker_configs

STEPS = 8
JOB = job_data(end={"steps": STEPS}, global_batch=4)
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


class Group:
    """A server of several processes."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self.log = log
        assert process.stdout is not None
        self.address = process.stdout.readline().removeprefix("listening on ").strip()
        assert re.fullmatch(r"127\.0\.0\.1:\d+", self.address), log.read_text()

    @property
    def workers(self) -> list[int]:
        """Process ids."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for thread in threads for pid in thread.read_text().split()]

    def metrics(self) -> admin_service_pb2.GetMetricsResponse:
        """The numbers of all processes."""
        with grpc.insecure_channel(self.address, OWN_CONNECTION) as channel:
            return AdminServiceStub(channel).GetMetrics(admin_service_pb2.GetMetricsRequest(), timeout=TIMEOUT_S)

    def stub(self, stack: ExitStack) -> DataServiceStub:
        """A client with a connection of its own, to whichever process."""
        options = (*OWN_CONNECTION, *FIXED_WINDOW)
        return DataServiceStub(stack.enter_context(grpc.insecure_channel(self.address, options)))


@contextmanager
def group(datasets: dict[str, Path], folder: Path, *flags: str, count: int = 2) -> Iterator[Group]:
    """A server of `count` processes."""
    shards = [part for name, path in datasets.items() for part in ("--dataset", f"{name}={path}")]
    line = command("serve", "--listen", "127.0.0.1:0", "--workers", str(count), *shards, *flags)
    log = folder / "group.log"
    with log.open("w") as errors:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True)
    with process:
        try:
            yield Group(process, log)
        finally:
            if process.poll() is None:
                process.kill()


def create(stub: DataServiceStub, data: dict[str, Any] = JOB) -> str:
    request = data_service_pb2.GetOrCreateJobRequest(job_spec_json=json.dumps(data))
    return stub.GetOrCreateJob(request, timeout=TIMEOUT_S).job_id


def open_stream(stub: DataServiceStub, data: dict[str, Any] = JOB, module: str = "llm") -> Any:
    request = data_service_pb2.StreamMicrobatchesRequest(job_id=create(stub, data), module=module)
    return stub.StreamMicrobatches(request, timeout=TIMEOUT_S)


def test_all_processes_serve_the_same_bytes_and_plan_each_step_once(datasets: dict[str, Path], tmp_path: Path) -> None:
    with running(datasets) as alone:
        expected = alone.read(alone.create(JOB).job_id, "llm", 0).blob()
    with group(datasets, tmp_path) as server, ExitStack() as stack:
        stubs = [server.stub(stack) for _ in range(16)]
        until(lambda: server.log.read_text().count("1 of 1 other servers are live") == 2)
        said = re.findall(r"\[(\d+)\]: peer \S+ answers", server.log.read_text())
        assert sorted(map(int, said)) == sorted(server.workers)
        streams = [open_stream(stub) for stub in stubs]
        assert all(receive(stream).blob() == expected for stream in streams)
        own = [
            AdminServiceStub(stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION))).GetMetrics(
                admin_service_pb2.GetMetricsRequest(this_process=True), timeout=TIMEOUT_S
            )
            for _ in range(16)
        ]
        sent = {answer.resident_bytes: answer.sent_microbatches for answer in own}
        whole = server.metrics()
        assert whole.sent_microbatches == 16 * len(expected) > max(sent.values()) > 0, "one process sent everything"
        assert sum(entry.plans for entry in whole.plan_times) in (STEPS, STEPS + 1)
        assert whole.known_jobs == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0, server.log.read_text()


def test_a_process_that_is_killed_is_started_again(datasets: dict[str, Path], tmp_path: Path) -> None:
    with group(datasets, tmp_path) as server, ExitStack() as stack:
        victim, other = server.workers
        os.kill(victim, signal.SIGKILL)
        until(lambda: "was killed by SIGKILL; it is started again in 1 s" in server.log.read_text())
        until(lambda: len(server.workers) == 2)
        assert other in server.workers
        assert victim not in server.workers
        until(lambda: server.metrics().uptime.seconds >= 0 and receive(open_stream(server.stub(stack))).end is not None)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0


def test_counters_do_not_fall_where_a_process_is_started_again(datasets: dict[str, Path], tmp_path: Path) -> None:
    """But for those of the process with the endpoint, whose sums begin at zero as those of a server would."""
    with group(datasets, tmp_path, "--metrics-listen", "127.0.0.1:0") as server, ExitStack() as stack:
        assert server.process.stdout is not None
        url = server.process.stdout.readline().removeprefix("metrics on ").strip()
        endpoint = int(url.removesuffix("/metrics").rpartition(":")[2])
        first = next(pid for pid in server.workers if endpoint in ports(pid))
        (second,) = set(server.workers) - {first}
        until(lambda: both_send(server, stack, endpoint))
        before = sent_microbatches(url)
        os.kill(second, signal.SIGKILL)
        until(lambda: sent_microbatches(url) == before and "does not answer" in server.log.read_text())
        until(lambda: sent_microbatches(url) == before and "answers again" in server.log.read_text())
        until(lambda: both_send(server, stack, endpoint))
        assert sent_microbatches(url) > before
        os.kill(first, signal.SIGKILL)
        until(lambda: first not in server.workers)
        until(lambda: answers(url))
        assert sent_microbatches(url) == 0


def both_send(server: Group, stack: ExitStack, endpoint: int) -> bool:
    """Whether both processes have sent something, after some more streams."""
    for _ in range(8):
        receive(open_stream(server.stub(stack)))
    own = admin_service_pb2.GetMetricsRequest(this_process=True)
    alone = [max(ports(pid) - {int(server.address.rpartition(":")[2]), endpoint}) for pid in server.workers]
    channels = [stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", OWN_CONNECTION)) for port in alone]
    found = [AdminServiceStub(channel).GetMetrics(own, timeout=TIMEOUT_S) for channel in channels]
    return all(answer.sent_microbatches for answer in found)


def ports(pid: int) -> set[int]:
    """At which a process listens."""
    return {c.laddr[1] for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def answers(url: str) -> bool:
    try:
        return sent_microbatches(url) >= 0
    except OSError:
        return False


def sent_microbatches(url: str) -> float:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    (sent,) = families["disttrain_sent_microbatches"].samples
    return float(sent.value)


def test_a_drain_of_the_address_ends_all(datasets: dict[str, Path], tmp_path: Path) -> None:
    with group(datasets, tmp_path, "--drain-grace-s", "5") as server, ExitStack() as stack:
        streams = [open_stream(server.stub(stack)) for _ in range(6)]
        until(lambda: server.metrics().open_streams == 6)
        admin = AdminServiceStub(stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION)))
        assert admin.Drain(admin_service_pb2.DrainRequest(), timeout=TIMEOUT_S).open_streams == 6
        reasons = {receive(stream).end.reason for stream in streams}  # type: ignore[union-attr]
        end = data_service_pb2.EndOfStream
        assert reasons <= {end.REASON_DRAINING, end.REASON_END_OF_JOB}
        assert server.process.wait(TIMEOUT_S) == 0


def test_the_children_of_a_parent_that_is_killed_end(datasets: dict[str, Path], tmp_path: Path) -> None:
    with group(datasets, tmp_path) as server:
        workers = server.workers
        server.process.kill()
        server.process.wait()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_the_limit_of_streams_is_that_of_all_together(photographs: Path, tmp_path: Path) -> None:
    with group({"photos": photographs}, tmp_path, "--max-streams", "5") as server, ExitStack() as stack:
        streams = [open_stream(server.stub(stack), large_job(), "vit") for _ in range(5)]
        for stream in streams:
            next(stream)
        for _ in range(6):  # whichever process it reaches
            with pytest.raises(grpc.RpcError) as error:
                next(open_stream(server.stub(stack), large_job(), "vit"))
            assert reason_of(error.value)[1] == "TOO_MANY_STREAMS"
        streams[0].cancel()
        until(lambda: server.metrics().open_streams == 4)
        next(open_stream(server.stub(stack), large_job(), "vit"))


def test_one_metrics_endpoint_has_the_sums(datasets: dict[str, Path], tmp_path: Path) -> None:
    with group(datasets, tmp_path, "--metrics-listen", "127.0.0.1:0") as server, ExitStack() as stack:
        assert server.process.stdout is not None
        url = server.process.stdout.readline().removeprefix("metrics on ").strip()
        for _ in range(8):
            receive(open_stream(server.stub(stack)))
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
        (sent,) = families["disttrain_sent_microbatches"].samples
        assert sent.value == server.metrics().sent_microbatches > 0
        memory = families["process_resident_memory_bytes"].samples[0].value
        own = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in server.workers]
        assert memory > max(own) * 1.2, "only one process counts"
        assert families["process_start_time_seconds"].samples[0].value > 0


def test_a_server_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    line = command("serve", "--listen", "127.0.0.1:0", "--workers", "2", "--dataset", f"x={tmp_path}/none")
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert f"{tmp_path}/none" in done.stderr
    assert "a process of 2 ended before all served" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load_config(None, {"datasets": {"x": tmp_path}, "listen": f"127.0.0.1:{port}"})
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            worker_configs(config, 2).__enter__()


def test_processes_share_what_the_configuration_permits(tmp_path: Path) -> None:
    config = load_config(
        None,
        {"datasets": {"x": tmp_path}, "decode_threads": 5, "prefetch_bytes": 1 << 30, "metrics_listen": "127.0.0.1:0"},
    ).model_copy(update={"listen": "127.0.0.1:0"})
    with worker_configs(config, 2) as (first, second):
        assert first.decode_threads == second.decode_threads == 3
        assert first.prefetch_bytes + second.prefetch_bytes == config.prefetch_bytes
        assert first.job_bytes + second.job_bytes == config.job_bytes
        assert first.max_streams == second.max_streams == config.max_streams, "places are shared one by one"
        assert first.listen == second.listen != config.listen
        assert first.metrics_listen is not None
        assert second.metrics_listen is None
        assert first.worker is not None
        assert sibling_addresses(second) == [f"127.0.0.1:{first.worker.ports[0]}"]
        assert load_config(None, json.loads(first.model_dump_json())) == first


def test_the_number_of_processes() -> None:
    cores = usable_cores()
    asked = {"datasets": {"x": Path("/x")}}
    assert number_of_workers(load_config(None, asked).workers) == 1
    assert number_of_workers(load_config(None, {**asked, "workers": 7}).workers) == 7
    assert number_of_workers("auto") == max(1, cores // CORES_PER_WORKER)
    for wrong in (0, 257, "many"):
        with pytest.raises(ConfigError, match="'workers"):
            load_config(None, {**asked, "workers": wrong})


def test_places_of_a_process_that_is_killed_are_free_again() -> None:
    file = Places.file()
    try:
        code = f"""
import sys
from dataserver.serving.places import Places
places = Places(3, {file})
print([places.take() for _ in range(2)], flush=True)
sys.stdin.read()
"""
        line = [sys.executable, "-c", code]
        pipe = subprocess.PIPE
        with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, pass_fds=[file]) as other:
            assert other.stdout is not None
            assert json.loads(other.stdout.readline()) == [2, 1]
            places = Places(3, file)
            assert [places.take(), places.take()] == [0, None]
            places.give(0)
            assert places.take() == 0
            other.kill()
            other.wait()
            assert [places.take(), places.take(), places.take()] == [2, 1, None]
    finally:
        os.close(file)


def test_a_place_that_is_given_back_frees_no_other() -> None:
    file = Places.file()
    try:
        places = Places(4, file)
        assert [places.take(), places.take(), places.take()] == [3, 2, 1]
        places.give(2)
        code = f"""
from dataserver.serving.places import Places
places = Places(4, {file})
print([places.take() for _ in range(3)])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, pass_fds=[file])
        assert done.stdout == "[2, 0, None]\n"
    finally:
        os.close(file)


def test_sums_of_numbers_of_processes() -> None:
    one = admin_service_pb2.GetMetricsResponse(open_streams=2, sent_bytes=5, resident_bytes=7)
    other = admin_service_pb2.GetMetricsResponse(open_streams=1, known_jobs=3)
    for answer, seconds, plans in ((one, 9, 4), (other, 5, 2)):
        answer.uptime.FromSeconds(seconds)
        answer.waits.planning.FromMilliseconds(300 * seconds)
        answer.plan_times.add(plans=plans).at_most.FromSeconds(1)
        answer.plan_times.add(plans=1)
        answer.kept.limit = 10
        answer.ranks.add(job="j", module="m", rank=seconds)
    whole = summed([one, other])
    assert (whole.open_streams, whole.sent_bytes, whole.resident_bytes, whole.known_jobs) == (3, 5, 7, 3)
    assert whole.uptime.seconds == 5
    assert whole.waits.planning.ToMilliseconds() == 4200
    assert [(t.at_most.seconds, t.plans) for t in whole.plan_times] == [(1, 6), (0, 2)]
    assert whole.kept.limit == 20
    assert [rank.rank for rank in whole.ranks] == [5, 9]
