"""All servers gone, the store gone, servers of two builds: what a run sees, and that its bytes are the same."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from benchmarks.range_server import State
from disttrain.v1 import admin_service_pb2
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from e2e.streams import Clients, dataset_flags, digest, read_views, start_servers
from faults.processes import Member
from faults.relay import Mode
from ports import free_addresses
from serving.harness import index, job_data
from shards import write_interleaved, write_pairs
from soak.soaking import behind_a_relay
from stores import no_stores, stores

from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving.config import load_config

__all__ = ["no_stores", "stores"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

GONE_S = 6.0
"""Longer than it takes until a trainer says that it waits."""
STEPS = 6


def job_of(folders: dict[str, Path]) -> Job:
    """A complete job of a few steps, each of several microbatches."""
    data = job_data(seq_len=640, global_batch=8, end={"steps": STEPS})
    return parse_job(fill_job(data, Catalog.open(load_config(None, {"datasets": folders}))))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "pairs": index(write_pairs(tmp_path / "pairs", 60, 20, seed=1, median_size=200)),
        "docs": index(write_interleaved(tmp_path / "docs", 24, 8, seed=2, median_size=200)),
    }


@contextmanager
def later(work: Callable[[], object]) -> Iterator[Callable[[Clients], None]]:
    """What begins an outage, which `work` ends after `GONE_S` in a thread."""
    threads: list[threading.Thread] = []

    def end() -> None:
        time.sleep(GONE_S)
        work()

    def begin(_: Clients) -> None:
        threads.append(threading.Thread(target=end))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()


def read(addresses: Sequence[str], job: Job, at: Callable[[Clients], None]) -> Any:
    """All views; something happens in the middle of the third step."""
    return read_views(addresses, job, digest, {2: at})


def test_all_servers_gone_and_back(folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trainclient.stream")
    flags, job = dataset_flags(folders), job_of(folders)
    with ExitStack() as stack:
        undisturbed = read_views([*start_servers(stack, flags, 1)], job, digest)
        members = [Member(flags, tmp_path / f"{number}.log") for number in range(2)]
        for member in members:
            stack.callback(member.close)

        def start() -> None:
            for member in members:
                member.start()

        begin = stack.enter_context(later(start))

        def kill(clients: Clients) -> None:
            for member in members:
                member.kill()
            begin(clients)

        assert read([member.address for member in members], job, kill) == undisturbed
    waits = [record for record in caplog.records if "no server could" in record.getMessage()]
    assert waits
    assert len({record.threadName for record in waits}) == 1, "one rank speaks for all"
    assert all(member.address in waits[-1].getMessage() for member in members)


def test_the_store_gone_and_back(
    stores: tuple[State, str],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    state, address = stores
    state.put_folder("/bucket/laion", folders["pairs"])
    with ExitStack() as stack:
        store = stack.enter_context(behind_a_relay(address))
        there = {"pairs": index(Path("s3://bucket/laion")), "docs": folders["docs"]}
        job = job_of(there)
        undisturbed = read_views([*start_servers(stack, dataset_flags(folders), 1)], job, digest)
        member = Member([*dataset_flags(there), "--block-memory-bytes", "65536"], tmp_path / "server.log")
        stack.callback(member.close)
        begin = stack.enter_context(later(lambda: store.set(Mode.PASS)))

        def cut(clients: Clients) -> None:
            store.set(Mode.RESET)
            begin(clients)

        assert read([member.address], job, cut) == undisturbed
        said = member.log.read_text()
    assert "s3://bucket" in said
    assert "Traceback" not in said


def test_servers_of_two_builds_give_the_same_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    """As in a rolling upgrade: a peer of another build is asked for no plan, and readers notice nothing."""
    job, addresses = job_of(folders), free_addresses(2)
    flags = [*dataset_flags(folders), "--peers", ",".join(addresses)]
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "sitecustomize.py").write_text(
        "from dataserver.fleet import build\nbuild.build_id = lambda: 'e' * 64  # before others import it\n"
    )
    environments: list[dict[str, str]] = [{}, {"PYTHONPATH": str(newer)}]
    with ExitStack() as stack:
        undisturbed = read_views([*start_servers(stack, dataset_flags(folders), 1)], job, digest)
        members = [
            Member(flags, tmp_path / f"{number}.log", listen=address, environment=environment)
            for number, (address, environment) in enumerate(zip(addresses, environments, strict=True))
        ]
        for member in members:
            stack.callback(member.close)
        builds = [build_of(address) for address in addresses]
        assert builds[1] == "e" * 64 != builds[0]
        assert read(addresses, job, lambda _: members[0].kill()) == undisturbed
        assert all("Traceback" not in member.log.read_text() for member in members)


def build_of(address: str) -> str:
    """What a server says that it is."""
    with grpc.insecure_channel(address) as channel:
        stub = AdminServiceStub(channel)
        return str(stub.GetDiagnostics(admin_service_pb2.GetDiagnosticsRequest(), timeout=20).build)
