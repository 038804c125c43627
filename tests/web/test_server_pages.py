"""The pages of a server: its fleet and datasets, for those whom it knows, as far as their rights go."""

import json
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
import yaml
from builders.authority import TOKENS, Authority, token_file, write
from cli.server_process import command
from disttrain.v1 import admin_service_pb2 as pb
from disttrain.v1 import data_service_pb2 as pb_data
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from google.protobuf.duration_pb2 import Duration
from serving.harness import Running, index, job_data, running
from shards import break_images, write_pairs
from web.harness import fleet_when, get, password

from dataserver.security import Channels, Credentials
from dataserver.web.server_pages import ServerPages

POLICY = {
    "identities": [
        {"name": "trainer", "token": "alice", "datasets": ["broken"]},
        {"name": "watcher", "token": "bob", "datasets": ["whole"], "rights": ["metrics"]},
        {"name": "operator", "token": "ops", "datasets": ["*"], "rights": ["admin"]},
        {"name": "servers", "token": "peers", "datasets": ["*"], "rights": ["read", "metrics"]},
    ]
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    broken = index(write_pairs(root / "broken", 16, 16, seed=6))
    break_images(broken, (3, 0))
    return {"broken": broken, "whole": index(write_pairs(root / "whole", 8, 8, seed=7))}


@contextmanager
def pages(server: Running) -> Iterator[str]:
    shown = ServerPages(server.server, "127.0.0.1:0")
    try:
        yield shown.url
    finally:
        shown.close()


def address_of(url: str) -> str:
    return url.partition("://")[2].strip("/")


@pytest.fixture
def fleet(folders: dict[str, Path], tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of the pages of the first of two servers that ask for tokens, and the addresses of both."""
    policy = write(tmp_path / "policy.yaml", yaml.safe_dump(POLICY).encode())
    knowing: dict[str, Any] = {"token_file": token_file(tmp_path, *TOKENS), "policy": policy}
    alice = Credentials(token_file=write(tmp_path / "alice", TOKENS["alice"].encode()))
    with running(folders, credentials=alice, **knowing) as other:
        job = job_data(datasets=[{"name": "broken"}], end={"steps": 1}, generation={"ratio": "0"})
        other.read(other.create(job).job_id)
        with running(folders, peers=[other.address], web_listen="127.0.0.1:0", **knowing) as own, pages(own) as url:
            yield address_of(url), [own.address, other.address]


def as_(name: str) -> dict[str, str]:
    return {"Authorization": password(TOKENS[name])}


def test_a_visitor_sees_what_the_policy_lets_it(fleet: tuple[str, list[str]]) -> None:
    page, both = fleet
    for path in ("/", "/api/fleet", "/api/datasets"):
        assert (get(page, path).status, get(page, path, Authorization=password("x" * 32)).status) == (401, 401)
    assert get(page, "/", **as_("alice")).status == 200
    refused = get(page, "/api/fleet", **as_("alice"))
    assert (refused.status, "metrics is required" in refused.json()["error"]) == (403, True)
    listed = get(page, "/api/datasets", **as_("alice")).json()
    assert ([one["name"] for one in listed["datasets"]], listed["withheld"]) == (["broken"], 0)
    assert get(page, "/api/dataset/samples?dataset=broken", **as_("alice")).status == 200
    assert get(page, "/api/dataset/samples?dataset=whole", **as_("alice")).status == 404
    assert get(page, "/api/datasets", **as_("bob")).status == 403, "the right to read is required"

    def checked(found: Any) -> bool:
        return found["checks"] is not None and all("problem" not in one for one in found["servers"])

    found = fleet_when(page, checked, **as_("ops"))
    assert [one["address"] for one in found["servers"]] == both
    assert {(one["dataset"], one["server"]) for one in found["failed"]} == {("broken", both[1])}
    found = fleet_when(page, checked, **as_("bob"))
    assert [one["address"] for one in found["servers"]] == both
    assert found["failed"] == [], "of a dataset that the watcher may not read"
    assert "broken" not in json.dumps(found)
    assert fleet_when(page, checked, **as_("ops"))["failed"] != []


def test_steps_of_the_jobs_that_a_server_knows_are_shown_to_those_who_may_read_all_of_their_datasets(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    policy = write(tmp_path / "policy.yaml", yaml.safe_dump(POLICY).encode())
    knowing: dict[str, Any] = {"token_file": token_file(tmp_path, *TOKENS), "policy": policy}
    ops = Credentials(token_file=write(tmp_path / "ops", TOKENS["ops"].encode()))
    with (
        running(folders, credentials=ops, peers=["127.0.0.1:1"], web_listen="127.0.0.1:0", **knowing) as server,
        pages(server) as url,
    ):
        page = address_of(url)
        nothing = get(page, "/api/step?step=0", **as_("ops"))
        assert (nothing.status, "trainers bring theirs" in nothing.json()["error"]) == (404, True)
        both = job_data(datasets=[{"name": "broken"}, {"name": "whole"}], end={"steps": 2}, generation={"ratio": "0"})
        one = server.create(job_data(datasets=[{"name": "broken"}], end={"steps": 3}, generation={"ratio": "0"})).job_id
        two = server.create(both).job_id

        def listed(who: str) -> dict[str, int]:
            return {job["job"]: job["num_steps"] for job in get(page, "/api/jobs", **as_(who)).json()["jobs"]}

        assert listed("ops") == {one: 3, two: 2}
        assert listed("alice") == {one: 3}
        assert get(page, "/api/jobs", **as_("bob")).status == 403

        def worked(who: str, path: str, job: str) -> Any:
            while "working" in (answer := get(page, f"/api/{path}?step=1&job={job}", **as_(who)).json()):
                time.sleep(0.05)
            return answer

        found = worked("ops", "step", two)["found"]
        planned = next(p for p in server.server.jobs.planners() if p.job.job_id == two).plan(1)
        assert (found["job"], found["plan"], found["num_steps"]) == (two, planned.hash.hex(), 2)
        assert {o["sample"]["dataset"] for o in found["costly_operations"] if o["sample"]} <= {"broken", "whole"}
        for path in ("step", "step/measured", "step/policies"):
            refused = get(page, f"/api/{path}?step=1&job={two}", **as_("alice"))
            assert (refused.status, two[:12] in refused.json()["error"]) == (404, True), "nor what was worked out"
            assert get(page, f"/api/{path}?step=1&job=%00<b>", **as_("alice")).status == 404
        assert worked("alice", "step", "")["found"]["job"] == one, "the first one that she may see"
        times = pb_data.StepTimes(job_id=one, step=1, module="vit", rank=0, step_time=Duration(seconds=1))
        server.stub.ReportStepTimes(pb_data.ReportStepTimesRequest(times=times), timeout=60)
        measured = worked("alice", "step/measured", one)["found"]
        assert measured["reports"] == 1
        assert [silent["server"] for silent in measured["silent"]] == ["127.0.0.1:1"]


def test_pages_answer_to_the_names_that_they_are_given(folders: dict[str, Path]) -> None:
    with (
        running(folders, web_listen="127.0.0.1:0", web_hosts=["fleet.example", "Other.Example"]) as server,
        pages(server) as url,
    ):
        page = address_of(url)
        for name in ("fleet.example", "other.example:8420", "localhost", page):
            assert get(page, "/api/datasets", Host=name).status == 200
        for name in ("stranger.example", "fleet.example.stranger.example", "fleet.example\t", ""):
            assert get(page, "/api/datasets", Host=name).status == 403


def test_over_tls_a_server_asks_itself_and_its_pages_are_encrypted(folders: dict[str, Path], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    keys = authority.server("server", "elsewhere.example", "127.0.0.1")
    shown = authority.client()
    with (
        running(folders, credentials=shown, client_ca=authority.file, web_listen="127.0.0.1:0", **keys) as server,
        pages(server) as url,
    ):
        assert url.startswith("https://")
        stranger = ssl.create_default_context(cafile=authority.file)
        with pytest.raises(OSError, match=r"certificate required|reset|closed|EOF"):
            urlopen(f"{url}api/fleet", context=stranger, timeout=60).read()
        known = ssl.create_default_context(cafile=authority.file)
        known.load_cert_chain(shown.tls_cert or "", shown.tls_key)
        found: Any = {"servers": []}
        while not found["servers"]:
            with urlopen(f"{url}api/fleet", context=known, timeout=60) as answer:
                found = json.load(answer)
        assert [(one["address"], one.get("problem")) for one in found["servers"]] == [(server.address, None)]


def test_without_the_own_token_the_own_socket_lets_nobody_in(folders: dict[str, Path], tmp_path: Path) -> None:
    alice = Credentials(token_file=write(tmp_path / "alice", TOKENS["alice"].encode()))
    policy = write(tmp_path / "policy.yaml", yaml.safe_dump(POLICY).encode())
    files = {"token_file": token_file(tmp_path, *TOKENS), "policy": policy}
    with running(folders, credentials=alice, web_listen="127.0.0.1:0", **files) as server:
        where = server.server.own_address
        folder = Path(where.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700, "other users cannot reach it"

        def code(token: str | None) -> Any:
            with Channels(token=None if token is None else lambda: token).open(where) as channel:
                try:
                    AdminServiceStub(channel).GetMetrics(pb.GetMetricsRequest(), timeout=60)
                except grpc.RpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

        assert code(None) is code("x" * 64) is grpc.StatusCode.UNAUTHENTICATED
        assert code(TOKENS["alice"]) is grpc.StatusCode.PERMISSION_DENIED
        assert code(server.server.access.own_token) is grpc.StatusCode.OK
    assert not folder.exists()


def test_the_command_serves_pages_until_it_ends(folders: dict[str, Path]) -> None:
    data = f"broken={folders['broken']}"
    line = command("serve", "--dataset", data, "--listen", "127.0.0.1:0", "--web-listen", "127.0.0.1:0")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        url = re.fullmatch(r"pages on (http://.*/)\n", process.stdout.readline())
        assert said.startswith("listening on ")
        assert url, said
        page = address_of(url[1])
        (one,) = fleet_when(page, lambda found: found["servers"])["servers"]
        assert f"listening on {one['address']}\n" == said
        assert [d["name"] for d in get(page, "/api/datasets").json()["datasets"]] == ["broken"]
        taken = command("serve", "--dataset", data, "--listen", "127.0.0.1:0", "--web-listen", page)
        done = subprocess.run(taken, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "choose another address with --web-listen" in done.stderr) == (2, True), done
        assert "Traceback" not in done.stderr
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
