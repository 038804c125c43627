"""`dataserver doctor` before real servers."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from benchmarks.range_server import State
from builders.authority import TOKENS, Authority, shown, token_file, write
from cli.server_process import TIMEOUT_S, refused, run, serving
from cli.test_top import Stranger, grpc_server
from disttrain.v1 import admin_service_pb2 as admin
from fleet.servers import fleet, until
from google.protobuf.timestamp_pb2 import Timestamp
from serving.harness import index, job_data, running
from shards import break_images, write_pairs
from stores import no_stores, stores

from dataserver.reporting.fleet_calls import NamedServers
from dataserver.reporting.fleet_setup import look
from dataserver.security import Channels, files
from dataserver.serving.failures import FailureKind

__all__ = ["no_stores", "stores"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at whenever they are asked for, not once a second."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("doctor") / "d", 8, 8))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_a_fleet_that_is_well(pairs: Path, stack: ExitStack) -> None:
    servers = stack.enter_context(fleet({"d": pairs}, 2))
    for server in servers:  # until it has found itself in its list, it takes itself for a peer that does not answer
        until(lambda server=server: server.server.peers.count() == (1, 1))
    done = run("doctor", *(server.address for server in servers))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing is wrong"), done
    assert done.stdout.startswith("2 of 2 servers answer; release ")


def test_a_fleet_that_is_not(pairs: Path, tmp_path: Path, stack: ExitStack) -> None:
    other = index(write_pairs(tmp_path / "other", 8, 8, seed=9))
    one = stack.enter_context(running({"d": pairs}))
    two = stack.enter_context(running({"d": other, "e": pairs}))
    done = run("doctor", f"{one.address},{two.address}", "127.0.0.1:1")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 of 3 servers answer")
    assert any(line.startswith("127.0.0.1:1: does not answer: ") for line in lines)
    assert any(line.startswith(f"{one.address}: dataset d fingerprint ") for line in lines)
    assert f"{one.address}: dataset e missing" in lines
    assert lines[-1] == "5 findings"


def test_caches_too_small_for_a_shuffle_window_of_a_store(pairs: Path, stores: tuple[State, str]) -> None:
    stores[0].put_folder("/bucket/d", pairs)
    dataset = f"d={index(Path('s3://bucket/d'))}"
    with serving("--dataset", dataset, "--block-memory-bytes", "0") as few, serving("--dataset", dataset) as enough:
        done = run("doctor", few.address, enough.address)
    _, found, remedy, verdict = done.stdout.splitlines()
    assert (done.returncode, verdict) == (1, "1 finding"), done
    assert found.startswith(f"{few.address}: its caches hold 0 MiB of blocks from object stores; 1 MiB are wanted for ")
    assert remedy.strip().startswith("raise --block-memory-bytes, or --block-cache-bytes with a --block-cache-dir, ")


def test_samples_that_failed_are_named_and_are_no_fault_of_the_fleet(tmp_path: Path, stack: ExitStack) -> None:
    broken = index(write_pairs(tmp_path / "d", 16, 16, seed=6))
    break_images(broken, (3, 0))
    server = stack.enter_context(running({"d": broken}))
    job = server.create(job_data(datasets=[{"name": "d"}], end={"epochs": 1}, generation={"ratio": "0"}))
    for rank in (0, 1):
        server.read(job.job_id, "vit", rank)
    done = run("doctor", server.address)
    shard = server.catalog.datasets["d"].shards[0]
    failed, remedy, verdict = done.stdout.splitlines()[-3:]
    assert (done.returncode, verdict) == (0, "nothing is wrong"), done
    assert re.fullmatch(r"failed \(image\) at \d\d-\d\d \d\d:\d\d:\d\d: dataset d, .*", failed)
    assert f"dataset d, shard {shard.name}, sample {shard.keys()[3]}: image 0 cannot be made" in failed
    assert failed.endswith(f"({server.address})")
    assert "dataserver lint --decode" in remedy
    dataset = server.catalog.datasets["d"]
    server.server._metrics.failures.note(FailureKind.READ, "d", dataset, 0, -1, "Input/output error")
    done = run("doctor", server.address)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "1 finding")
    assert f"{server.address}: reads of shard {shard.name} of dataset d failed: Input/output error" in done.stdout


def test_a_server_where_a_revocation_was_forgotten(pairs: Path, tmp_path: Path, stack: ExitStack) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    tokens = [token_file(tmp_path / name, "alice", "ops") for name in ("one", "two")]
    one, two = (stack.enter_context(running({"d": pairs}, token_file=file)) for file in tokens)

    def asked() -> list[str]:
        done = run("doctor", one.address, two.address, "--token-file", shown(tmp_path, "ops"))
        return [line.partition(" ")[0] for line in done.stdout.splitlines() if "access digest" in line]

    assert asked() == []
    token_file(tmp_path / "one", "ops")
    assert asked() == [f"{one.address}:", f"{two.address}:"]


def test_a_fleet_that_asks_for_credentials(pairs: Path, tmp_path: Path, stack: ExitStack) -> None:
    authority = Authority(tmp_path / "pki")
    config = {**authority.server(), "token_file": token_file(tmp_path, "alice", "ops")}
    identities = "{name: a, token: alice, datasets: [d]}, {name: o, token: ops, datasets: [d], rights: [admin]}"
    policy = write(tmp_path / "policy.yaml", f"identities: [{identities}]".encode())
    client = authority.client()
    server = stack.enter_context(running({"d": pairs}, credentials=client, **config, policy=policy))

    def asked(*flags: str | Path) -> str:
        done = run("doctor", server.address, *flags)
        assert done.returncode == (0 if "nothing is wrong" in done.stdout else 1), done
        return done.stdout

    tls = ("--tls-ca", authority.file)
    assert "nothing is wrong" in asked(*tls, "--token-file", shown(tmp_path, "ops"))
    assert "refuses: a has the rights" in asked(*tls, "--token-file", shown(tmp_path, "alice"))
    assert "refuses: this server asks for a token and found none" in asked(*tls)
    assert "does it require TLS" in asked()
    assert "no authority of --tls-ca signed its certificate" in asked("--tls-ca", Authority(tmp_path / "x").file)

    token_file(tmp_path, "alice", "ops").write_text("ops short\n")
    write(policy, f"identities: [{identities.replace('[d]', '[d, e]')}]".encode())
    config["tls_cert"].write_text("no certificate")
    said = asked(*tls, "--token-file", shown(tmp_path, "ops"))
    assert f"{server.address}: the token file {tmp_path / 'tokens'}" in said
    assert f"{server.address}: the policy {policy}, identities.0.datasets.1: the server has no dataset of that" in said
    assert f"{server.address}: the certificate {config['tls_cert']} and the private key" in said
    assert said.count("what was revoked since is not") == 3

    secret = TOKENS["alice"]  # in the fields of others
    write(policy, f"identities: [{{name: a, token: {secret}: }}]".encode())
    write(tmp_path / "tokens", f"{secret} alice\n".encode())
    said = asked(*tls, "--token-file", shown(tmp_path, "ops"))
    assert f"{server.address}: the policy {policy}" in said
    assert f"{server.address}: the token file {tmp_path / 'tokens'}, line 1: its second word" in said
    assert secret not in said


class Odd(Stranger):
    """Answers as a server does, but for its clock; calls of one method it answers when it may."""

    def __init__(self, nanos: int = 0, late: str = "") -> None:
        super().__init__(b"")
        self.nanos, self.late, self.may_answer = nanos, late, threading.Event()

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        clock = admin.GetDiagnosticsResponse(time=Timestamp(nanos=self.nanos)).SerializeToString()

        def answer(_request: bytes, _context: Any) -> bytes:
            if method == self.late:
                self.may_answer.wait(TIMEOUT_S)
            return clock if method == "GetDiagnostics" else b""

        return grpc.unary_unary_rpc_method_handler(answer)


def test_a_server_that_says_what_cannot_be_is_named_and_the_others_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    with grpc_server(Odd(nanos=-1)) as odd, grpc_server(Odd()) as well, grpc_server(Stranger(b"\xff no")) as other:
        seen, silent = look(NamedServers((odd, other, well), Channels()))
    assert [one.address for one in seen] == [well]
    assert list(silent) == [odd, other]
    assert silent[odd][0].startswith("says what cannot be: ")
    assert silent[other][0] == "another program, or an older release"
    assert "Traceback" not in caplog.text


def test_servers_that_hang_do_not_add_up(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_s = 2.0
    monkeypatch.setattr("dataserver.reporting.fleet_setup.ANSWER_S", answer_s)
    odd = [Odd(late="GetDatasetInfo") for _ in range(8)]
    late = [stack.enter_context(grpc_server(one)) for one in odd]
    begun = time.monotonic()
    seen, silent = look(NamedServers(late, Channels()))
    assert time.monotonic() - begun < len(late) * answer_s
    for one in odd:
        one.may_answer.set()
    assert (seen, list(silent)) == ([], late)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "0 servers are named"),
        ([","], "0 servers are named; 1 to 256 are required"),
        (["127.0.0.1"], "HOST:PORT"),
        (["h:1-300"], "300 servers are named"),
        (["h:1", "--tls-cert", "x"], "--tls-cert and --tls-key belong together"),
        (["h:1", "--tls-ca", "/nothing-here"], "the file of authorities /nothing-here cannot be read"),
        (["h:1", "--token-file", "/nothing-here"], "the token file /nothing-here cannot be read"),
    ],
)
def test_what_cannot_be_asked(flags: list[str], said: str) -> None:
    assert said in refused("doctor", *flags)
