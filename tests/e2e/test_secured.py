"""A secured server as its operator starts it, its clients, and strangers who stall in their handshakes."""

import contextlib
import json
import resource
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from builders.authority import TOKENS, Authority, shown, token_file, write
from cli.server_process import command, run, serving
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from serving.harness import FIXED_WINDOW, TIMEOUT_S, index, job_data, receive
from shards import write_pairs

from dataserver.addresses import split_address
from dataserver.security import Channels, Credentials
from trainclient.stream.client import ArrayClient
from trainclient.stream.endpoint import Timeouts
from trainclient.stream.errors import ClientError

JOB = job_data(datasets=[{"name": "d"}], end={"steps": 6})
FILES = 1024
STALLED = 3 * FILES // 4
ATTACK = f"""
import socket, sys, time
sockets = []
for _ in range({STALLED}):
    sockets.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
    try:
        sockets[-1].sendall(bytes.fromhex("1603010200010001fc0303"))
    except OSError:  # closed at once, beyond half of the server's descriptors
        continue
print("stalled", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("secured") / "d", 24, 8))


def flags(folder: Path, tmp_path: Path, authority: Authority) -> list[str | Path]:
    """Of a server with everything."""
    config = authority.server()
    identities = [
        {"name": "team", "token": "alice", "certificate": "spiffe://test/trainer", "datasets": ["d"]},
        {"name": "ops", "token": "ops", "datasets": ["*"], "rights": ["admin"]},
    ]
    policy = write(tmp_path / "policy.yaml", yaml.safe_dump({"identities": identities}).encode())
    return [
        *("--dataset", f"d={folder}", "--tls-cert", config["tls_cert"], "--tls-key", config["tls_key"]),
        *("--client-ca", authority.file, "--token-file", token_file(tmp_path, "alice", "bob", "ops")),
        *("--policy", policy),
    ]


def test_strangers_whose_handshakes_fail_write_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    config = Authority(tmp_path / "pki").server()
    tls = ("--tls-cert", config["tls_cert"], "--tls-key", config["tls_key"])
    with serving("--dataset", f"d={folder}", *tls, by_hand=True) as server:
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"hello\n" * 20):
            with socket.create_connection(split_address(server.address), TIMEOUT_S) as stranger:
                stranger.sendall(said)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(4096):
                        pass
        code, errors = server.end()
    assert (code, [line for line in errors.splitlines() if "Handshake failed" in line]) == (0, [])


def test_a_trainer_reads_and_an_operator_looks(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    own = authority.client()
    credentials = {name: Credentials(own.tls_ca, own.tls_cert, own.tls_key, shown(tmp_path, name)) for name in TOKENS}
    with serving(*flags(folder, tmp_path, authority)) as server:
        with ArrayClient(server.address, JOB, "vit", 0, credentials=credentials["alice"]) as client:
            assert [batch.step for batch in client][-1] == 5
        quick = Timeouts(first_answer=2.0, give_up=2.0)
        for shown_, said in (
            (credentials["bob"], "no identity of this server's policy has token bob"),
            (credentials["peers"], "asks for a token and found one that it does not know"),
            (own, "asks for a token and found none"),
            (Credentials(own.tls_ca, token_file=credentials["alice"].token_file), "a certificate that it knows"),
            (Credentials(Authority(tmp_path / "x").file), "no authority of --tls-ca signed its certificate"),
        ):
            with pytest.raises(ClientError, match=said):
                ArrayClient(server.address, JOB, "vit", 0, credentials=shown_, timeouts=quick)
        tls = ("--tls-ca", own.tls_ca, "--tls-cert", own.tls_cert, "--tls-key", own.tls_key)
        done = run("top", server.address, "--once", "--interval-s", "0.1", *tls, "--token-file", shown(tmp_path, "ops"))
        assert (done.returncode, server.address in done.stdout, "answer" in done.stdout) == (0, True, False), done
        done = run(
            "top", server.address, "--once", "--interval-s", "0.1", *tls, "--token-file", shown(tmp_path, "alice")
        )
        assert "refuses" in done.stdout
        code, errors = server.end()
    assert code == 0
    assert errors.count("dataserver.audit") >= 4
    assert "Traceback" not in errors
    secrets = [*TOKENS.values(), *(line for line in own.tls_key.read_text().splitlines() if len(line) > 40)]
    assert not [secret for secret in secrets if secret in errors]


@pytest.mark.long
def test_handshakes_that_stall_end_and_take_nobody_elses_connection(folder: Path, tmp_path: Path) -> None:
    """Three quarters of the server's descriptors, from another process. Whoever comes meanwhile gets in soon after."""
    authority = Authority(tmp_path / "pki")
    line = shlex.join(map(str, command("serve", "--listen", "127.0.0.1:0", *flags(folder, tmp_path, authority))))
    own = authority.client()
    credentials = Credentials(own.tls_ca, own.tls_cert, own.tls_key, shown(tmp_path, "alice"))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most > FILES
    assert STALLED >= 700
    with ExitStack() as stack:
        limited = ["bash", "-c", f"ulimit -n {FILES}; exec {line}"]
        server = stack.enter_context(subprocess.Popen(limited, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        channel = stack.enter_context(Channels(credentials).open(address, FIXED_WINDOW))
        stub = DataServiceStub(channel)
        text = json.dumps({**JOB, "execution": {**JOB["execution"], "end": {"steps": 1000}}})
        job_id = stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S).job_id
        stream = stub.StreamMicrobatches(pb.StreamMicrobatchesRequest(job_id=job_id, module="vit"))
        assert len(receive(stream, 2).microbatches) == 2

        attack = [sys.executable, "-c", ATTACK, *address.rsplit(":", 1)]
        attacker = stack.enter_context(subprocess.Popen(attack, stdout=subprocess.PIPE, text=True))
        stack.callback(attacker.kill)
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "stalled\n"
        assert len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < STALLED
        assert len(receive(stream, 4).microbatches) == 4, "an open stream goes on"
        with ArrayClient(address, JOB, "vit", 0, credentials=credentials, timeouts=Timeouts(connect=50.0)) as client:
            assert [batch.step for batch in client][-1] == 5
        stream.cancel()
