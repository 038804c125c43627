"""Whatever happens to a fleet, in whatever order: every rank receives the bytes of an undisturbed run."""

import logging
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks.data_connections import wrong_with
from benchmarks.range_server import State
from builders.jobs import module
from builders.three_encoders import three_encoders
from e2e.streams import Clients, dataset_flags, digest, read_views, start_servers, used_address
from faults.fleet import FAULTS, Jobs, sites_of
from faults.schedule import Schedule, draw
from serving.harness import FIXED_WINDOW, index, job_data
from shards import write_interleaved, write_pairs
from soak.soaking import DISK_PART, MEMORY_PART, bytes_of
from stores import no_stores, stores
from video.heard import write_heard

from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving.config import load_config
from trainclient.stream import direct, endpoint

__all__ = ["no_stores", "stores"]

SENT, GRPC = ["--no-shared-memory"], ["--no-shared-memory", "--no-direct"]
"""Flags of servers that send payloads over data connections, and of those that send chunks alone."""
SHORT = 6
"""Steps of the job that is read from a fleet before anything happens to it."""
SEED = "DISTTRAIN_FAULT_SEED"
"""The variable that replays a schedule."""

ODD = job_data(
    modules=[module("encoder", dp=8), module("backbone", dp=32), module("generator", "gen")], global_batch=256
)
"""A job of few and large steps; none is read."""


def test_schedules_hold_every_kind_and_are_repeated_by_their_seed() -> None:
    assert draw(7, 40, 3) == draw(7, 40, 3) != draw(8, 40, 3)
    assert {fault.kind for fault in draw(9, len(FAULTS), 2)} == FAULTS.keys()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("schedules")
    return {
        "pairs": index(write_pairs(root / "pairs", 60, 20, seed=1, median_size=200)),
        "docs": index(write_interleaved(root / "docs", 24, 8, seed=2, median_size=200)),
    }


def job_of(folders: dict[str, Path], steps: int, **changes: object) -> Job:
    """A complete job of steps of four or more microbatches."""
    data = job_data(seq_len=640, global_batch=8, end={"steps": steps}, **changes)
    return parse_job(fill_job(data, Catalog.open(load_config(None, {"datasets": folders}))))


def tighten(patch: pytest.MonkeyPatch) -> None:
    """Clients whose transport holds 64 KiB and not a whole job, so that faults meet streams; they wait less long."""
    patch.setattr(direct, "SILENCE_S", 2.0)
    patch.setattr(direct, "CONNECT_S", 2.0)
    options = endpoint._channel_options
    patch.setattr(endpoint, "_channel_options", lambda timeouts: [*options(timeouts), *FIXED_WINDOW])
    patch.setattr(endpoint, "PING_TIMEOUT_MS", 1500)


@pytest.mark.parametrize(
    ("count", "servers", "seed", "flags"),
    [
        # Continuous integration runs the same schedule each time, so that a failure is one of the change.
        pytest.param(20, 3, 1, SENT, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(200, 3, None, SENT, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
        pytest.param(200, 3, None, [], marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
        pytest.param(60, 2, None, GRPC, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.parametrize("peers", [pytest.param(False, marks=pytest.mark.long), True], ids=["strangers", "peers"])
def test_any_schedule_of_faults_leaves_every_digest(
    folders: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    count: int,
    servers: int,
    seed: int | None,
    flags: list[str],
    peers: bool,
) -> None:
    flags = [*dataset_flags(folders), "--drain-grace-s", "5", *flags]
    run_schedule(folders, folders, flags, tmp_path, caplog, draw_seed(count, seed), count, servers, peers)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_any_schedule_of_faults_leaves_every_digest_of_shards_in_a_store(
    stores: tuple[State, str], folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers own blocks; memory and disks of all of them hold a part."""
    count = 100
    local = {**folders, "pairs": index(write_pairs(tmp_path / "small", 60, 5, seed=1, median_size=200))}
    stores[0].put_folder("/bucket/laion", local["pairs"])
    there = {**folders, "pairs": index(Path("s3://bucket/laion"))}
    total = bytes_of(local["pairs"])
    memory = ["--block-memory-bytes", str(total // MEMORY_PART)]
    flags = [*dataset_flags(there), "--drain-grace-s", "5", "--no-shared-memory", *memory]
    changes = {"order_version": 2, "shuffle_window": 2}
    seed = draw_seed(count, None)
    run_schedule(local, there, flags, tmp_path, caplog, seed, count, 3, True, total // DISK_PART, **changes)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_any_schedule_of_faults_leaves_every_digest_of_three_modalities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pictures, videos and their sound."""
    pytest.importorskip("av", reason="the extra video is not installed")
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    count, folders = 20, {"heard": write_heard(tmp_path / "heard", 48)}
    flags = [*dataset_flags(folders), "--drain-grace-s", "5", *SENT]
    changes = {**three_encoders(llm=2), "datasets": [{"name": "heard"}], "microbatch": 1}
    run_schedule(folders, folders, flags, tmp_path, caplog, draw_seed(count, None), count, 3, True, **changes)


def draw_seed(count: int, seed: int | None) -> int:
    """The seed of a schedule, which is printed."""
    seed = int(os.environ.get(SEED) or (secrets.randbits(32) if seed is None else seed))
    sys.stderr.write(f"schedule of {count} faults; {SEED}={seed} replays it\n")
    return seed


def run_schedule(
    undisturbed_folders: dict[str, Path],
    folders: dict[str, Path],
    flags: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    seed: int,
    count: int,
    servers: int,
    peers: bool,
    block_bytes: int = 0,
    **changes: object,
) -> None:
    """Read a job from one server that shares memory, and from a fleet with faults; a short one before the first."""
    caplog.set_level(logging.INFO, "trainclient.stream")
    job, short = (job_of(folders, steps, **changes) for steps in (count + 1, SHORT))
    with ExitStack() as stack:
        addresses = [*start_servers(stack, dataset_flags(undisturbed_folders), 1)]
        undisturbed, beforehand = (read_views(addresses, one, digest) for one in (job, short))
    with ExitStack() as stack:
        sites = sites_of(stack, flags, tmp_path, servers, peers=peers, block_bytes=block_bytes)
        assert read_views([sites[0].address], short, digest) == beforehand
        if SENT[0] in flags and GRPC[1] not in flags:
            assert wrong_with(sites[0].address) is None, "what nothing happens to goes over data connections"
            assert [text for text in caplog.messages if "payloads come over gRPC" in text] == []
        tighten(stack.enter_context(pytest.MonkeyPatch.context()))
        caplog.clear()
        schedule = Schedule(sites, Jobs(job.text, ODD), draw(seed, count, servers))

        def at(step: int) -> Callable[[Clients], None]:
            return lambda clients: schedule.reach(step, [used_address(client) for client in clients.values()])

        pauses = {step: at(step) for step in range(1, count + 1)}
        found = read_views([site.address for site in sites], job, digest, pauses)
        schedule.end()
        for site in sites:
            assert "Traceback" not in site.member.log.read_text()
    assert found == undisturbed, f"replay with {SEED}={seed}"
    assert len(caplog.messages) >= count // 5, "hardly any fault was noticed"
