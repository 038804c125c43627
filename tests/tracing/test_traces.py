"""Traces of real servers and clients, as a collector of the test's own has them."""

import json
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from benchmarks.range_server import State
from cli.server_process import command
from fleet.servers import until
from ports import free_addresses
from serving.harness import VIEWS, index, job_data, running
from shards import write_pairs
from stores import SECRET, no_stores, stores
from tracing.collector import Received, Seen, collecting

from dataserver.cli import main
from dataserver.serving.config import ConfigError, load_config
from dataserver.tracing import Collector, Tracing
from dataserver.tracing.otlp import CLOSE_S, QUEUED, OtlpRecorder
from dataserver.tracing.spans import Finished, Kind
from trainclient.stream.client import ArrayClient

__all__ = ["no_stores", "stores"]

STEPS = 20
"""So many that each server owns some of them, whatever their hashes are; there are as many blocks as shards, 12."""
PREPARE = ("step", "wait", "prepare")
PLAN = ("step", "wait", "plan")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("traced") / "pairs", 24, 8))


def read(addresses: list[str], tracing: Tracing | None, steps: int, **changes: object) -> list[bytes]:
    """What all ranks of a job get, one after the other."""
    job, found = job_data(datasets=[{"name": "pairs"}], end={"steps": steps}), []
    for view in VIEWS:
        with ArrayClient(addresses, job, *view, tracing=tracing, **changes) as client:
            for batch in client:
                found += [batch.tensors[name].tobytes() for name in sorted(batch.tensors)]
    return found


def sent(collector: Received, waits: int) -> list[Seen]:
    """All spans, as soon as there are so many of the two kinds that come last, and none comes any more."""

    def complete() -> bool:
        names = Counter(one.name for one in collector.spans)
        return names["wait"] == names["send"] == waits

    until(complete)
    before = -1
    while before != (before := len(collector.spans)):
        time.sleep(1.5)  # they are sent every second
    return collector.spans


def test_a_server_adds_to_the_traces_of_its_clients(pairs: Path) -> None:
    with collecting() as collector, running({"pairs": pairs}, otlp_endpoint=collector.url) as server:
        traced = read([server.address], Tracing(collector.url, every=2), steps=3)
        num_microbatches = 0
        for view in VIEWS:
            with ArrayClient(server.address, job_data(datasets=[{"name": "pairs"}], end={"steps": 3}), *view) as client:
                num_microbatches += sum(batch.step != 1 for batch in client)
        assert traced == read([server.address], None, steps=3)
        spans = sent(collector, num_microbatches)
    assert len({one.trace for one in spans}) == 2, "steps 0 and 2"
    paths = {collector.path(one) for one in spans}
    assert paths >= {
        (*PREPARE, "lay out"),
        (*PREPARE, "decode", "read shard"),
        (*PREPARE, "encode"),
        (*PLAN, "make plan"),
    }
    assert all(path[0] == "step" for path in paths)
    assert Counter(path[-1] for path in map(collector.path, spans))["step"] == 2
    for one in spans:
        parent = collector.parent_of(one) if one.parent else None
        if parent is not None and parent.name != "wait":  # servers work ahead of waits
            assert parent.start <= one.start
        if one.name == "wait":
            assert one.attributes["disttrain.module"] in ("vit", "llm", "gen")
            assert one.attributes["disttrain.step"] in (0, 2)
        if one.name == "send":
            assert (
                one.attributes["disttrain.transport"] == "shared memory"
                or one.attributes["disttrain.transport"] == "grpc"
            )
    assert {one.service.split()[0] for one in spans} == {"disttrain-client", "disttrain-dataserver"}


def test_who_does_not_trace_costs_the_other_nothing(pairs: Path) -> None:
    with collecting() as collector:
        with running({"pairs": pairs}) as server:
            read([server.address], Tracing(collector.url, every=1), steps=1)
        with running({"pairs": pairs}, otlp_endpoint=collector.url) as server:
            read([server.address], None, steps=1)
        until(lambda: collector.spans)
        time.sleep(1.5)
    assert {one.name for one in collector.spans} == {"wait", "receive", "step"}


ENDING = """
import sys
from dataserver.tracing import Tracing
from trainclient.stream.client import ArrayClient
address, job, collector = sys.argv[1:]
client = ArrayClient(address, job, "vit", 0, tracing=Tracing(collector, every=1))
print(next(client).step)
"""


def test_a_process_that_ends_without_closing_anything_has_told_of_its_last_step(pairs: Path) -> None:
    job = json.dumps(job_data(datasets=[{"name": "pairs"}], end={"steps": 3}))
    with collecting() as collector, running({"pairs": pairs}) as server:
        line = [sys.executable, "-c", ENDING, server.address, job, collector.url]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    by_name = {one.name: one for one in collector.spans if one.name != "receive"}
    assert set(by_name) == {"wait", "step"}
    received = [one for one in collector.spans if one.parent == by_name["wait"].id]
    assert [one.name for one in received] == ["receive"]
    assert received[0].attributes["disttrain.server"] == server.address
    assert received[0].attributes["disttrain.bytes"] > 0


def test_a_dead_collector_harms_nothing(pairs: Path) -> None:
    """Nobody listens at one, and the other one takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silence = f"http://127.0.0.1:{silent.getsockname()[1]}"
        nobody = f"http://{free_addresses(1)[0]}"
        with running({"pairs": pairs}, otlp_endpoint=silence) as server:
            assert read([server.address], Tracing(nobody, every=1), steps=2) == read([server.address], None, steps=2)
        for endpoint in (silence, nobody):
            recorder = OtlpRecorder(Collector.of(endpoint, insecure=False), "disttrain-test")
            for number in range(2 * QUEUED):
                recorder.record(Finished("one", Kind.INTERNAL, 1, number + 1, 0, 1, 2, {"step": number}, ""))
            began = time.monotonic()
            recorder.close()
            assert time.monotonic() - began < 2 * CLOSE_S


def test_collectors_beyond_this_machine_need_encryption(pairs: Path) -> None:
    fixed = {"datasets": {"pairs": pairs}}
    with pytest.raises(
        ConfigError, match=r"the collector of traces is http://10\.0\.0\.1:4317, and traces and tokens would travel"
    ):
        load_config(None, {**fixed, "otlp_endpoint": "http://10.0.0.1:4317"})
    with pytest.raises(ConfigError, match="the collector of traces is 'x'; http://HOST:PORT"):
        load_config(None, {**fixed, "otlp_endpoint": "x"})
    for allowed in ({"otlp_endpoint": "https://10.0.0.1:4317"}, {"otlp_endpoint": "http://a:1", "insecure": True}):
        assert load_config(None, {**fixed, **allowed}).otlp_endpoint == allowed["otlp_endpoint"]


@contextmanager
def fleet(addresses: list[str], collector: Received) -> Iterator[None]:
    """Server processes over the bucket."""
    fixed = ("--dataset", "pairs=s3://bucket/pairs", "--peers", ",".join(addresses), "--otlp-endpoint", collector.url)
    with ExitStack() as stack:
        processes = []
        for address in addresses:
            line = command("serve", "--listen", address, *fixed)
            process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening on ")
        yield


@pytest.mark.long
def test_a_trace_leads_from_a_wait_to_a_peer_and_its_storage(stores: tuple[State, str], tmp_path: Path) -> None:
    """Two processes; the ranks read from one, which asks the other one for the plans and the blocks that it owns."""
    folder = index(write_pairs(tmp_path / "local", 24, 2))
    stores[0].put_folder("/bucket/pairs", folder)
    assert main(["index", "s3://bucket/pairs", "--workers", "1"]) == 0
    addresses = free_addresses(2)
    job = job_data(datasets=[{"name": "pairs"}], end={"steps": STEPS})
    waits = 0
    with collecting() as collector:
        with fleet(addresses, collector):
            for view in VIEWS:
                with ArrayClient(addresses[0], job, *view, tracing=Tracing(collector.url, every=1)) as client:
                    waits += sum(1 for _ in client)
        spans = sent(collector, waits)
    assert len({one.trace for one in spans}) == STEPS
    assert Counter(one.name for one in spans)["step"] == STEPS
    paths = {collector.path(one) for one in spans}
    assert {path[:2] for path in paths if len(path) > 1} == {("step", "wait")}
    assert (*PLAN, "fetch plan", "give plan", "make plan") in paths
    pieces = [one for one in spans if collector.path(one)[-3:] == ("fetch pieces", "give pieces", "read store")]
    assert pieces
    for one in pieces:
        asking = collector.parent_of(collector.parent_of(one))
        assert asking.service != one.service
        assert asking.service.startswith("disttrain-dataserver")
        assert collector.path(asking)[:3] == PREPARE
    assert len({one.service for one in spans}) == 3
    shown = " ".join(str(value) for one in spans for value in (one.name, one.status, *one.attributes.values()))
    hidden = [str(tmp_path), SECRET, "bucket", "00000"]
    for shard in folder.glob("*.tar"):
        with tarfile.open(shard) as tar:
            texts = [tar.extractfile(name) for name in tar.getnames() if name.endswith(".txt")]
            hidden += [text.read().decode() for text in texts if text is not None]
    assert len(hidden) > 24
    assert [text for text in hidden if text in shown] == []
