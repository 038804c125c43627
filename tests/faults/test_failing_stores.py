"""A store that drips, refuses, or goes away under readers: who hears of it, what it says, and the bytes afterwards."""

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import grpc
import pytest
from benchmarks.range_server import State, handled_by
from disttrain.v1 import data_service_pb2 as pb
from e2e.streams import Clients, dataset_flags, digest, read_views, start_servers
from faults.processes import Member
from faults.relay import Mode
from serving.harness import Running, index, job_data, reason_of, receive, running
from shards import write_pairs
from soak.soaking import behind_a_relay
from stores import SECRET, no_stores, stores

from dataserver.assembly import load_tokenizer
from dataserver.dataset import BLOCKS, build_index, count_tokens
from dataserver.dataset.storage import bucket_client, http_client, retries
from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving import registry
from dataserver.serving.config import load_config
from trainclient.stream import rotation
from trainclient.stream.client import ArrayClient
from trainclient.stream.endpoint import Timeouts
from trainclient.stream.errors import ClientError

__all__ = ["no_stores", "stores"]

Stores = tuple[State, str]
GONE_S = 3.0
PATIENT = Timeouts(give_up=180)
HURRIED = ((http_client, "BASE_S", 2.0), (bucket_client, "REQUEST_S", 2.0), (retries, "PATIENCE_S", 4.0))
"""What an answer may take, and all answers to one request together, where a test waits for both."""
LONGEST_S = 400.0
"""Of a stream over a store that drips, with the patience that servers have."""


def job_of(folders: dict[str, Path], **changes: Any) -> Job:
    """A complete job of a few steps, each of several microbatches."""
    fields = {"datasets": [{"name": name} for name in folders], "end": {"steps": 8}, **changes}
    return parse_job(fill_job(job_data(**fields), Catalog.open(load_config(None, {"datasets": folders}))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards on disk, indexed."""
    return index(write_pairs(tmp_path / "pairs", 48, 8, seed=1))


def put(stores: Stores, folder: Path, name: str, scheme: str = "s3") -> Path:
    """Put shards into the store under a name; the URL of the dataset."""
    state, address = stores
    state.put_folder(f"/bucket/{name}", folder)
    last = len([*folder.glob("*.tar")]) - 1
    return Path(f"s3://bucket/{name}" if scheme == "s3" else f"{address}/bucket/{name}/{{00000..{last:05}}}.tar")


def indexed(url: Path, folder: Path) -> Path:
    """Where the index of a dataset lies that has none beside it."""
    build_index(url, folder, workers=1)
    count_tokens(url, load_tokenizer("bytes"), folder)
    return folder


def images(server: Running, job_id: str) -> list[tuple[bytes, bytes]]:
    """All bytes of a rank of images."""
    request = pb.StreamMicrobatchesRequest(job_id=job_id, module="vit")
    return receive(server.stub.StreamMicrobatches(request, timeout=LONGEST_S)).blob()


def asked_again(server: Running, job_id: str) -> list[tuple[bytes, bytes]]:
    """The same, as a client asks for it: what was asked for before may still be given up."""
    until = time.monotonic() + LONGEST_S
    while True:
        try:
            return images(server, job_id)
        except grpc.RpcError as error:
            if reason_of(error)[1:3] != ("STORAGE_UNAVAILABLE", "RETRY") or time.monotonic() > until:
                raise


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize(
    "hurried",
    [
        pytest.param(True, marks=pytest.mark.slow),
        pytest.param(False, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
    ids=["hurried", "patient"],
)
def test_bodies_that_drip_end_in_a_clear_error_and_harm_no_neighbour(
    stores: Stores, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, hurried: bool
) -> None:
    """A byte now and then is no silence. What drips for a while costs its requests, and the stream goes on."""
    if hurried:
        for module, name, seconds in HURRIED:
            monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(registry, "PATIENCE_S", LONGEST_S)
    state = stores[0]
    names = ("dripping", "neighbour")
    datasets = {**{name: put(stores, folder, name, scheme) for name in names}, "local": folder}
    index_dirs = {name: indexed(datasets[name], tmp_path / name) for name in names}
    BLOCKS.configure(0)
    with running(datasets, index_dirs=index_dirs) as server, ThreadPoolExecutor(1) as pool:
        jobs = {name: job_data(datasets=[{"name": name}], end={"epochs": 1}) for name in datasets}
        job_ids = {name: server.create(data).job_id for name, data in jobs.items()}
        undisturbed = {name: images(server, job_id) for name, job_id in job_ids.items()}
        state.asked.clear()
        state.of_paths = {path: "drip" for path in state.objects if path.startswith("/bucket/dripping/")}
        reading = pool.submit(images, server, job_ids["dripping"])
        while not state.asked:
            time.sleep(0.01)
        for name in ("neighbour", "local"):
            assert images(server, job_ids[name]) == undisturbed[name]
        error = reading.exception()
        assert isinstance(error, grpc.RpcError)
        code, reason, action, text = reason_of(error)
        assert (code, reason, action) == (grpc.StatusCode.UNAVAILABLE, "STORAGE_UNAVAILABLE", "RETRY")
        assert "/bucket/dripping/0000" in text
        assert "given up; check the storage" in text
        assert re.search({"s3": "it took too long", "http": "bytes came in|came too slowly"}[scheme], text)
        state.of_paths = {}
        assert asked_again(server, job_ids["dripping"]) == undisturbed["dripping"]
        state.faults = ["drip"]
        assert images(server, job_ids["dripping"]) == undisturbed["dripping"]
        assert state.faults == []


@dataclass
class Role:
    """The credentials that a machine's role has, as its metadata service gives them."""

    key: str = "first-key"
    asked: list[str] = field(default_factory=list)


class _Metadata(BaseHTTPRequestHandler):
    """As the second version of Amazon's instance metadata service."""

    role: Role

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nobody reads it."""

    def do_PUT(self) -> None:
        self._send(b"session")

    def do_GET(self) -> None:
        self.role.asked.append(self.path)
        if self.path.endswith("/security-credentials/"):
            self._send(b"role-of-tests")
            return
        soon = datetime.now(UTC) + timedelta(seconds=60)  # clients take new ones some minutes before
        found = {"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": self.role.key, "SecretAccessKey": SECRET}
        dates = {"LastUpdated": "2026-01-01T00:00:00Z", "Expiration": soon.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self._send(json.dumps({**found, **dates, "Token": "token-of-tests"}).encode())

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def role(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    """Credentials of the machine, which a service gives anew, and none in the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    role = Role()
    with handled_by(_Metadata, role=role) as address:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", address)
        yield role


def test_credentials_that_expire_under_a_reader_are_one_clear_error_until_there_are_new_ones(
    stores: Stores, folder: Path, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """S3 answers 400 to what has expired. A role of the machine is renewed without a new start of the server."""
    state, url = stores[0], index(put(stores, folder, "laion"))
    BLOCKS.configure(0)
    job = job_of({"pairs": url})
    with running({"pairs": folder}) as server, ArrayClient(server.address, job, "vit", 0) as client:
        undisturbed = [one.tensors["patches"].tobytes() for one in client]
    with running({"pairs": url}, prefetch_bytes=0) as server:
        state.expired = f"Credential={role.key}/"
        quick = Timeouts(give_up=1)
        with ArrayClient(server.address, job, "vit", 0, timeouts=quick) as client, pytest.raises(ClientError) as caught:
            next(client)
        said = str(caught.value)
        for part in (server.address, "STORAGE_UNAVAILABLE", "s3://bucket/laion/0000", "ExpiredToken"):
            assert part in said
        assert "check the credentials, and renew them if they have expired" in said
        caplog.clear()
        state.expired = ""
        with ArrayClient(server.address, job, "vit", 0, prefetch_bytes=0, timeouts=PATIENT) as client:
            found = [next(client).tensors["patches"].tobytes()]
            state.expired = f"Credential={role.key}/"
            renewed = threading.Timer(GONE_S, lambda: setattr(role, "key", "second-key"))
            renewed.start()
            found += [one.tensors["patches"].tobytes() for one in client]
            renewed.join()
    assert found == undisturbed
    lost = [message for message in caplog.messages if "going to the next server" in message]
    assert len(lost) == 1, lost
    assert "renew them if they have expired" in lost[0]
    assert not any(secret in text for secret in (SECRET, "token-of-tests") for text in (said, *caplog.messages))


@pytest.mark.slow
def test_a_store_gone_for_seconds_is_waited_for_and_warned_of_by_the_servers(
    stores: Stores, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No rank hears of it: requests are made again."""
    caplog.set_level(logging.WARNING, "trainclient.stream")
    local, address = {"pairs": folder}, stores[1]
    put(stores, folder, "laion")
    with ExitStack() as stack:
        store = stack.enter_context(behind_a_relay(address))
        there = {"pairs": index(Path("s3://bucket/laion"))}
        job = job_of(there)
        undisturbed = read_views([*start_servers(stack, dataset_flags(local), 1)], job, digest)
        flags = [*dataset_flags(there), "--block-memory-bytes", "0", "--prefetch-bytes", "0"]
        members = [Member(flags, tmp_path / f"{number}.log") for number in range(2)]
        for member in members:
            stack.callback(member.close)
        times: list[float] = []

        def come_back() -> None:
            store.set(Mode.PASS)
            times.append(time.monotonic())

        back = threading.Timer(GONE_S, come_back)

        def cut(_: Clients) -> None:
            times.append(time.monotonic())
            store.set(Mode.RESET)
            back.start()

        assert read_views([member.address for member in members], job, digest, {1: cut}, PATIENT) == undisturbed
        back.join()
        logs = [member.log.read_text() for member in members]
    warned = [log for log in logs if "s3://bucket does not answer as it should (" in log]
    assert warned, "a server met the outage"
    most = 1 + (times[1] - times[0]) / retries.WARN_EVERY_S
    for log in warned:
        assert log.count("does not answer as it should") <= most
        assert "; it is asked again" in log
        assert "s3://bucket answers again" in log
    assert all("Traceback" not in log for log in logs)
    heard = ("going to the next server", "no server could")
    assert [message for message in caplog.messages if any(what in message for what in heard)] == []


@pytest.mark.slow
def test_of_a_store_gone_for_longer_one_rank_tells(
    stores: Stores, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its patience and the first rank's reports are shorter here, as if the store were gone for minutes."""
    caplog.set_level(logging.WARNING, "trainclient.stream")
    monkeypatch.setattr(retries, "PATIENCE_S", 0.5)
    monkeypatch.setattr(rotation, "REPORT_EVERY_S", 0.5)
    BLOCKS.configure(0)
    state, url = stores[0], index(put(stores, folder, "laion"))
    job = job_of({"pairs": url})
    with running({"pairs": folder}) as server:
        undisturbed = read_views([server.address], job, digest)

    def said(what: str) -> list[logging.LogRecord]:
        return [record for record in tuple(caplog.records) if what in record.getMessage()]

    def heal() -> None:
        until = time.monotonic() + 60
        time.sleep(GONE_S)
        while len(said("no server could")) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        state.always = ""

    healing = threading.Thread(target=heal)

    def cut(_: Clients) -> None:
        state.always = "503"
        healing.start()

    with running({"pairs": url}, prefetch_bytes=0) as server:
        assert read_views([server.address], job, digest, {1: cut}, PATIENT) == undisturbed
        healing.join()
        address = server.address
    told = said("no server could")
    assert len(told) >= 2
    assert {record.threadName for record in told} == {"reader-vit-0"}
    for part in (address, "STORAGE_UNAVAILABLE", "s3://bucket does not answer"):
        assert all(part in record.getMessage() for record in told), part
    lost = [name for record in said("going to the next server") if (name := record.threadName) != "reader-vit-0"]
    assert len(lost) == len({*lost}), "each other rank says once that it lost its server"
