"""The runbooks of upgrades: servers of an older release are replaced one by one, or stay for a while beside newer ones.

The older release is this one under another number, without the newest rules of plans and without one field of jobs.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from cli.server_process import run, spawn
from disttrain.v1.admin_service_pb2 import GetMetricsRequest, GetMetricsResponse
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from disttrain.v1.data_service_pb2 import GetServerInfoRequest
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from e2e.streams import Clients, dataset_flags, digest, read_views, start_servers, used_address
from faults.processes import Member
from foreign import node
from ports import free_addresses
from serving.harness import index, job_data
from shards import write_pairs

from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving.config import load_config
from trainclient.client import Batch
from trainclient.stream.endpoint import Timeouts
from trainclient.stream.errors import FleetError
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import resolve_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

OLDER = """
import importlib.metadata as metadata

version = metadata.version
metadata.version = lambda name: "0.0.9" if name == "disttrain" else version(name)

from dataserver.planning.job import fields  # before others import it

fields.PLAN_LIMITS = {5: fields.PLAN_LIMITS[5]}

from dataserver.planning.job.spec import Execution

del Execution.__pydantic_fields__["validity"]
Execution.validity = None
"""
PAUSE_S = 0.1
"""Between two microbatches of a reader, while servers are replaced."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"pairs": index(write_pairs(tmp_path_factory.mktemp("upgrades") / "pairs", 60, 20, seed=1, median_size=64))}


@pytest.fixture
def older(tmp_path: Path) -> dict[str, str]:
    """Variables of a process that is of the older release."""
    folder = tmp_path / "older"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OLDER)
    return {"PYTHONPATH": str(folder)}


def job_of(folders: dict[str, Path], steps: int, **changes: Any) -> Job:
    """A complete job whose steps have several microbatches; its plans are of a version that both releases have."""
    fields = {"seq_len": 512, "global_batch": 8, "end": {"steps": steps}, "plan_version": 5, **changes}
    data = job_data(datasets=[{"name": "pairs"}], **fields)
    return parse_job(fill_job(data, Catalog.open(load_config(None, {"datasets": folders}))))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def started(
    stack: ExitStack, flags: Sequence[str], tmp_path: Path, environments: Sequence[dict[str, str]]
) -> list[Member]:
    """A fleet whose servers know each other."""
    addresses = free_addresses(len(environments))
    flags = [*flags, "--peers", ",".join(addresses), "--drain-grace-s", "5"]
    members = []
    for number, (address, environment) in enumerate(zip(addresses, environments, strict=True)):
        log = tmp_path / f"{number}.log"
        members.append(Member(flags, log, listen=address, environment=environment))
        stack.callback(members[-1].close)
    return members


def metrics_of(address: str) -> GetMetricsResponse:
    with grpc.insecure_channel(address) as channel:
        return AdminServiceStub(channel).GetMetrics(GetMetricsRequest(), timeout=20)


def test_three_servers_are_replaced_under_readers(
    folders: dict[str, Path], older: dict[str, str], tmp_path: Path, stack: ExitStack
) -> None:
    steps = 40
    flags, job = dataset_flags(folders), job_of(folders, steps)
    undisturbed = read_views([*start_servers(stack, flags, 1)], job, digest)
    members = started(stack, flags, tmp_path, [older] * 3)
    releases, codes = [], []
    is_over = threading.Event()

    def replace() -> None:
        for member in members:
            releases.append(release_of(member.address))
            member.drain()
            codes.append(member.wait())
            member.start(environment={})
            assert "does not answer" not in spawn("top", member.address, "--once", "--interval-s", "0.1").stdout
        is_over.set()

    upgrade = threading.Thread(target=replace)

    def begin(clients: Clients) -> None:
        assert {used_address(client) for client in clients.values()} <= {member.address for member in members}
        upgrade.start()

    def slowly(batch: Batch) -> Any:
        if batch.step > 1 and not is_over.is_set():
            time.sleep(PAUSE_S)
        return digest(batch)

    found = read_views(
        [member.address for member in members], job, slowly, {1: begin, steps - 3: lambda _: is_over.wait(50)}
    )
    upgrade.join()
    assert found == undisturbed
    assert (releases, codes) == (["0.0.9"] * 3, [0] * 3)
    assert "0.0.9" not in {release_of(member.address) for member in members}
    logs = [member.log.read_text() for member in members]
    assert all("Traceback" not in log for log in logs)
    assert any("they share no plans until both are of one" in log for log in logs)
    assert [metrics_of(member.address).plans_by_source.wrong for member in members] == [0] * 3
    done = run("doctor", *(member.address for member in members))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing is wrong"), done


def release_of(address: str) -> str:
    """What a server says that it is."""
    with grpc.insecure_channel(address) as channel:
        return DataServiceStub(channel).GetServerInfo(GetServerInfoRequest(), timeout=20).release


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan_version": 6}, r"supports plan_version [5], the job is pinned to 6"),
        ({"validity": "exact"}, "refuses the job, which servers of release"),
    ],
)
def test_a_fleet_half_on_an_older_release_refuses_what_is_new_by_name(
    folders: dict[str, Path],
    older: dict[str, str],
    tmp_path: Path,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    named: str,
) -> None:
    caplog.set_level(logging.WARNING, "trainclient.stream")
    flags, job = dataset_flags(folders), job_of(folders, 4, **changes)
    undisturbed = read_views([*start_servers(stack, flags, 1)], job, digest)
    old, new = started(stack, flags, tmp_path, [older, {}])
    assert read_views([old.address, new.address], job, digest) == undisturbed
    refusals = [message for message in caplog.messages if f"server {old.address} (release 0.0.9)" in message]
    assert refusals
    assert all(named in message for message in refusals)
    assert metrics_of(old.address).sent_microbatches == 0
    new.kill()
    quick = Timeouts(give_up=5, first_answer=5)
    with pytest.raises(FleetError, match=r"0\.0\.9.*(plan_version|validity: this key is unknown)"):
        read_views([old.address, new.address], job, digest, timeouts=quick)
    assert "Traceback" not in old.log.read_text()


def test_a_job_is_filled_in_by_the_server_whose_release_takes_it(
    folders: dict[str, Path], older: dict[str, str], tmp_path: Path, stack: ExitStack
) -> None:
    old, new = started(stack, dataset_flags(folders), tmp_path, [older, {}])
    data = json.loads(job_of(folders, 4, validity="exact").text)
    for dataset in data["stream"]["datasets"]:
        del dataset["fingerprint"]
    fleet = Fleet([old.address, new.address])
    stack.callback(fleet.close)
    assert resolve_job(data, fleet).job_id == job_of(folders, 4, validity="exact").job_id


def test_javascript_passes_an_older_server_over(
    folders: dict[str, Path], older: dict[str, str], tmp_path: Path, stack: ExitStack
) -> None:
    """Its ranks begin at different servers, so that one of them brings the job to the older one."""
    node.require_node()
    flags, file = dataset_flags(folders), tmp_path / "job.json"
    file.write_text(job_of(folders, 4, validity="exact").text)
    undisturbed = node.read([*start_servers(stack, flags, 1)], file)
    old, new = started(stack, flags, tmp_path, [older, {}])
    said = "execution.validity: this key is unknown"
    for addresses in ([new.address, old.address], [old.address, new.address]):
        found = node.read(addresses, file, odd={old.address: said})
        assert found.contents() == undisturbed.contents()
        assert found.servers() == {new.address}


def test_what_both_releases_have_is_served_by_both_alike(
    folders: dict[str, Path], older: dict[str, str], tmp_path: Path, stack: ExitStack
) -> None:
    """Each half plans every step, and a reader that loses its server goes on at one of the other release."""
    flags, job = dataset_flags(folders), job_of(folders, 8)
    undisturbed = read_views([*start_servers(stack, flags, 1)], job, digest)
    old, new = started(stack, flags, tmp_path, [older, {}])
    addresses = [old.address, new.address]

    def lose(clients: Clients) -> None:
        assert {used_address(client) for client in clients.values()} == set(addresses), "both are read from"
        new.kill()

    found = read_views(addresses, job, digest, {4: lose})
    assert found == undisturbed
    assert metrics_of(old.address).plans_by_source.fetched == 0
    new.start()
    done = run("doctor", *addresses)
    assert done.returncode == 1
    for member, release in ((old, "0.0.9"), (new, release_of(new.address))):
        assert f"{member.address}: release {release}, build " in done.stdout
    assert "finish the rolling upgrade" in done.stdout
    assert "content digest" not in done.stdout
