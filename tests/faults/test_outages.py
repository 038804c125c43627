"""All servers gone, a store gone or silent, servers of two builds: what a run sees, and that its bytes are the same."""

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from benchmarks.range_server import State
from cli.server_process import refused
from disttrain.v1 import admin_service_pb2
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from e2e.streams import Clients, dataset_flags, digest, read_views, start_servers
from faults.fleet import sites_of
from faults.processes import Member
from faults.relay import Mode
from ports import free_addresses
from serving.harness import index, job_data
from shards import write_interleaved, write_pairs
from soak.soaking import DISK_PART, MEMORY_PART, behind_a_relay, bytes_of, image_bytes
from stores import no_stores, stores

from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.kernels import cache
from dataserver.serving.config import load_config
from trainclient.stream import rotation
from trainclient.stream.endpoint import Timeouts

__all__ = ["no_stores", "stores"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

GONE_S = 30.0
"""Servers. Trainers say much earlier that they wait."""
STORE_GONE_S = 60.0
"""Longer than servers ask it again for one image: streams end, and begin anew."""
PATIENT = Timeouts(give_up=180)
STEPS = 6


def job_of(folders: dict[str, Path], **changes: Any) -> Job:
    """A complete job of a few steps, each of several microbatches."""
    data = job_data(seq_len=640, global_batch=8, end={"steps": STEPS}, **changes)
    return parse_job(fill_job(data, Catalog.open(load_config(None, {"datasets": folders}))))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "pairs": index(write_pairs(tmp_path / "pairs", 60, 20, seed=1, median_size=200)),
        "docs": index(write_interleaved(tmp_path / "docs", 24, 8, seed=2, median_size=200)),
    }


@contextmanager
def later(work: Callable[[], object], after_s: float) -> Iterator[Callable[[Clients], None]]:
    """What begins an outage, which `work` ends after some seconds in a thread."""
    threads: list[threading.Thread] = []

    def end() -> None:
        time.sleep(after_s)
        work()

    def begin(_: Clients) -> None:
        threads.append(threading.Thread(target=end))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()


def read(addresses: Sequence[str], job: Job, at: Callable[[Clients], None]) -> Any:
    """All views; something happens in the middle of the third step."""
    return read_views(addresses, job, digest, {2: at}, PATIENT)


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

        begin = stack.enter_context(later(start, GONE_S))

        def kill(clients: Clients) -> None:
            for member in members:
                member.kill()
            begin(clients)

        assert read([member.address for member in members], job, kill) == undisturbed
    waits = [record for record in caplog.records if "no server could" in record.getMessage()]
    assert waits
    speaker = waits[0].threadName
    others = [record for record in waits if record.threadName != speaker]
    assert len(others) == len({record.threadName for record in others}), (
        "one rank speaks for all, the others say it once"
    )
    late = [float(re.findall(r"for (\d+) s of", record.getMessage())[0]) for record in others]
    assert all(waited >= rotation.REPORT_LATE_S for waited in late), "which they do where servers come back late"
    assert all(member.address in waits[-1].getMessage() for member in members)


@pytest.mark.parametrize("mode", [Mode.RESET, Mode.FREEZE])
def test_the_store_gone_and_back(
    stores: tuple[State, str], folders: dict[str, Path], tmp_path: Path, mode: Mode
) -> None:
    """Its servers own blocks together, in memory and on disks that hold a part of them, and read them ahead."""
    state, address = stores
    local = {"pairs": index(write_pairs(tmp_path / "small", 60, 5, seed=1, median_size=200)), "docs": folders["docs"]}
    state.put_folder("/bucket/laion", local["pairs"])
    total = bytes_of(local["pairs"])
    with ExitStack() as stack:
        store = stack.enter_context(behind_a_relay(address))
        there = {**local, "pairs": index(Path("s3://bucket/laion"))}
        job = job_of(there, order_version=2, shuffle_window=2)
        undisturbed = read_views([*start_servers(stack, dataset_flags(local), 1)], job, digest)
        flags = [*dataset_flags(there), "--block-memory-bytes", str(total // MEMORY_PART)]
        sites = sites_of(stack, flags, tmp_path, 2, peers=True, block_bytes=total // DISK_PART)
        addresses = [site.address for site in sites]
        begin = stack.enter_context(later(lambda: store.set(Mode.PASS), STORE_GONE_S))
        before: dict[str, int] = {}

        def cut(clients: Clients) -> None:
            before.update(image_bytes(addresses))
            store.set(mode)
            begin(clients)

        assert read(addresses, job, cut) == undisturbed
        after = image_bytes(addresses)
        said = "".join(site.member.log.read_text() for site in sites)
    assert after["the store"] > before["the store"], "it was asked after the outage"
    assert min(after["memory"], after["owners"]) > 0, after
    assert "s3://bucket does not answer as it should" in said
    assert "Traceback" not in said


def lose_disk(folder: Path) -> None:
    """Take a folder with all that is in it away at once, so that it cannot be made again."""
    folder.rename(folder.with_suffix(".lost"))
    folder.write_text("")


def test_the_disks_of_the_caches_gone(stores: tuple[State, str], folders: dict[str, Path], tmp_path: Path) -> None:
    """Those of --cache-dir and --block-cache-dir, under the readers of a job and before those of another one."""
    local = {"pairs": index(write_pairs(tmp_path / "small", 60, 5, seed=1, median_size=200)), "docs": folders["docs"]}
    stores[0].put_folder("/bucket/laion", local["pairs"])
    there = {**local, "pairs": index(Path("s3://bucket/laion"))}
    job = job_of(there, order_version=2, shuffle_window=2)
    sizing = {"rule": "qwen", "min_pixels": 3136, "max_pixels": 50176}  # by a kernel that the other one does not need
    later_job = job_of(there, order_version=2, shuffle_window=2, sizing=sizing)
    caches, blocks = tmp_path / "caches", tmp_path / "blocks"
    flags = [*dataset_flags(there), "--cache-dir", caches, "--block-cache-dir", blocks, "--block-memory-bytes", "0"]
    kernels = cache.folder()
    assert kernels is not None
    shutil.copytree(kernels, caches / kernels.name)  # or the server would compile
    with ExitStack() as stack:
        (reference,) = start_servers(stack, dataset_flags(local), 1)
        undisturbed = [read_views([reference], one, digest) for one in (job, later_job)]
        member = Member(flags, tmp_path / "log", environment={"NUMBA_CACHE_DIR": ""})
        stack.callback(member.close)
        held: list[Path] = []

        def lose(_: Clients) -> None:
            held.extend(blocks.glob("*/*.block"))
            lose_disk(caches)
            lose_disk(blocks)

        assert read([member.address], job, lose) == undisturbed[0]
        assert held, "blocks were on the disk"
        assert read_views([member.address], later_job, digest, timeouts=PATIENT) == undisturbed[1]
        assert diagnostics_of(member.address).open_files, "the server answers `dataserver doctor`"
        member.kill()
        said = member.log.read_text()
    assert re.search(rf"--block-cache-dir {blocks}: a block cannot be written \(.* directory\); none are for 30", said)
    assert "a compiled kernel cannot be cached" in said
    assert "Traceback" not in said
    assert f"--block-cache-dir {blocks} cannot be used" in refused("serve", "--listen", "127.0.0.1:0", *flags)


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
        builds = [diagnostics_of(address).build for address in addresses]
        assert builds[1] == "e" * 64 != builds[0]
        plans = []

        def lose(_: Clients) -> None:
            plans.extend(metrics_of(address).plans_by_source for address in addresses)
            members[0].kill()

        assert read(addresses, job, lose) == undisturbed
        plans.append(metrics_of(addresses[1]).plans_by_source)
        assert all(sources.own for sources in plans)
        assert [(sources.fetched, sources.wrong) for sources in plans] == [(0, 0)] * 3
        assert all("Traceback" not in member.log.read_text() for member in members)


def metrics_of(address: str) -> admin_service_pb2.GetMetricsResponse:
    """What a server counts."""
    with grpc.insecure_channel(address) as channel:
        return AdminServiceStub(channel).GetMetrics(admin_service_pb2.GetMetricsRequest(), timeout=20)


def diagnostics_of(address: str) -> admin_service_pb2.GetDiagnosticsResponse:
    """What a server says of itself."""
    with grpc.insecure_channel(address) as channel:
        return AdminServiceStub(channel).GetDiagnostics(admin_service_pb2.GetDiagnosticsRequest(), timeout=20)
