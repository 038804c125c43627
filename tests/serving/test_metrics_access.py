"""Who may see the metrics over HTTP: those who may over gRPC."""

import http.client
import socket
import ssl
from pathlib import Path

import pytest
import yaml
from builders.authority import TOKENS, Authority, token_file, write
from prometheus_client.utils import floatToGoString
from serving.harness import TIMEOUT_S, Running, running

from dataserver.addresses import split_address

IDENTITIES = [
    {"name": "trainer", "token": "alice", "datasets": ["*"]},
    {"name": "prometheus", "token": "bob", "rights": ["metrics"]},
    {"name": "host", "certificate": "prometheus.example.org", "rights": ["metrics"]},
]


def get(server: Running, context: ssl.SSLContext | None = None, token: str | None = None) -> tuple[int, bytes]:
    address = server.metrics_address
    connection = (
        http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection(address, timeout=TIMEOUT_S, context=context)
    )
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request("GET", "/metrics", headers=headers)
    found = connection.getresponse()
    body = found.read()
    connection.close()
    return found.status, body


def policy(folder: Path, *identities: dict[str, object]) -> Path:
    return write(folder / "policy.yaml", yaml.safe_dump({"identities": list(identities)}).encode())


def test_tokens(datasets: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"token_file": token_file(tmp_path, "alice", "bob"), "policy": policy(tmp_path, *IDENTITIES[:2])}
    with running(datasets, metrics_listen="127.0.0.1:0", **config) as server:
        status, body = get(server, token=TOKENS["bob"])
        assert (status, b"\ndisttrain_open_streams 0.0\n" in body) == (200, True)
        for token, refused in ((None, 401), ("0" * 40, 401), (TOKENS["alice"], 403)):
            status, body = get(server, token=token)
            assert (status, b"disttrain_" in body) == (refused, False)
        assert b"\ndisttrain_refused_calls_total 3.0\n" in get(server, token=TOKENS["bob"])[1]
    assert not [token for token in TOKENS.values() if token in caplog.text]
    assert caplog.text.count("refused GET /metrics of 127.0.0.1:") == 3


def test_certificates(datasets: dict[str, Path], tmp_path: Path) -> None:
    authority, theirs = Authority(tmp_path / "pki"), Authority(tmp_path / "theirs")
    config = {**authority.server(), "client_ca": authority.file, "policy": policy(tmp_path, IDENTITIES[2])}
    with running(datasets, credentials=authority.client(), metrics_listen="127.0.0.1:0", **config) as server:
        assert server.server.metrics_url == f"https://{server.metrics_address}/metrics"
        contexts = {}
        for name, (signer, host) in {
            "known": (authority, "prometheus.example.org"),
            "other": (authority, "other.example.org"),
            "foreign": (theirs, "prometheus.example.org"),
        }.items():
            contexts[name] = ssl.create_default_context(cafile=str(authority.file))
            contexts[name].load_cert_chain(*signer.issue(name, host))
        contexts["none"] = ssl.create_default_context(cafile=str(authority.file))
        status, body = get(server, contexts["known"])
        assert (status, b"\ndisttrain_open_streams 0.0\n" in body) == (200, True)
        with (
            socket.create_connection(split_address(server.metrics_address), TIMEOUT_S) as connection,
            contexts["known"].wrap_socket(connection, server_hostname="127.0.0.1") as shown,
        ):
            expires = ssl.cert_time_to_seconds(str((shown.getpeercert() or {})["notAfter"]))
        line = f"\ndisttrain_certificate_expiry_timestamp_seconds {floatToGoString(expires)}\n"
        assert line.encode() in body
        assert get(server, contexts["other"])[0] == 403
        for name in ("foreign", "none"):
            with pytest.raises(OSError, match=r"alert|reset|EOF|closed|Broken"):
                get(server, contexts[name])
        with pytest.raises((OSError, http.client.HTTPException)):
            get(server)
        assert get(server, contexts["known"])[0] == 200


def test_a_handshake_that_stalls_is_ended(
    datasets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataserver.serving.http_server.BoundedHttpServer.connection_s", 0.2)
    authority = Authority(tmp_path / "pki")
    with running(datasets, metrics_listen="127.0.0.1:0", **authority.server()) as server:
        where = split_address(server.metrics_address)
        for said in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET /metrics HTTP/1.1\r\n\r\n"):
            with socket.create_connection(where, TIMEOUT_S) as one:
                one.sendall(said)
                try:
                    while one.recv(4096):
                        pass
                except ConnectionResetError:
                    continue
        monkeypatch.undo()
        assert get(server, ssl.create_default_context(cafile=str(authority.file)))[0] == 200
