"""The HTTP endpoint: what it answers, and that hostile clients do no harm."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from fleet.servers import until
from serving.harness import TIMEOUT_S, Running, running

from dataserver.addresses import split_address
from dataserver.serving.config import ConfigError, load_config

MAX_CONNECTIONS = 16
"""As SECURITY.md has it."""

HOSTILE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"GET /metrics\r\n\r\n\r\n" * 100,
    b"GET /metrics HTTP/9.9\r\n\r\n",
    b"GET " + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"DELETE /metrics HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: " + b"application/openmetrics-text;q=x,;;" * 100 + b"\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    b"GET /metrics?name[]=\xff\xfe%00 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\r\n\r\n\x00\xff",
    b"",
]


@pytest.fixture
def server(datasets: dict[str, Path]) -> Iterator[Running]:
    with running(datasets, metrics_listen="127.0.0.1:0") as found:
        yield found


def connected(server: Running) -> socket.socket:
    return socket.create_connection(split_address(server.metrics_address), TIMEOUT_S)


def answer(server: Running, path: str = "/metrics", method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(server.metrics_address, timeout=TIMEOUT_S)
    connection.request(method, path)
    found = connection.getresponse()
    body = found.read()
    connection.close()
    return found.status, found.headers["Content-Type"], body


def test_metrics_and_nothing_else(server: Running) -> None:
    status, kind, body = answer(server, "/metrics?x=1")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert b"\ndisttrain_open_streams 0.0\n" in body
    assert answer(server, "/")[0] == 404
    assert answer(server, "/metrics/x")[0] == 404
    assert answer(server, method="POST")[0] == 501


@pytest.mark.parametrize("request_", HOSTILE)
def test_hostile_requests_do_no_harm(server: Running, request_: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with connected(server) as one, suppress(OSError):  # closed by the server, perhaps with bytes that nobody read
        one.sendall(request_)
        one.shutdown(socket.SHUT_WR)
        while one.recv(1 << 16):
            pass
    assert answer(server)[0] == 200
    assert capfd.readouterr().err == ""


def test_slow_clients_are_closed_and_make_room(server: Running) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(server)) for _ in range(MAX_CONNECTIONS)]
        for one in slow:
            one.sendall(b"GET /metrics HT")
        with connected(server) as late:
            assert late.recv(1) == b"", "one more is closed at once"
        for one in slow:
            assert one.recv(1 << 16) == b"", "and each of the others after a while"
    assert answer(server)[0] == 200


def test_clients_that_vanish_leave_no_trace(server: Running, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2 * MAX_CONNECTIONS):
        with connected(server) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
            one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    while True:  # until the last of them are gone
        try:
            assert answer(server)[0] == 200
            break
        except (ConnectionError, http.client.RemoteDisconnected):
            continue
    assert capfd.readouterr().err == ""


def test_the_address_is_closed_with_the_server(datasets: dict[str, Path]) -> None:
    with running(datasets, metrics_listen="[::1]:0") as server:
        address = server.metrics_address
        assert address is not None
        assert address.startswith("[::1]:")
        assert answer(server)[0] == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split_address(address), TIMEOUT_S)


def test_there_is_none_by_default(datasets: dict[str, Path]) -> None:
    with running(datasets) as server:
        assert server.server.metrics_url is None


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "[::]:0", "myhost.example:9464"])
def test_an_address_that_others_reach_needs_permission(address: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics_listen is .*--insecure"):
        load_config(None, {"datasets": {"d": "/data"}, "metrics_listen": address})
    assert load_config(None, {"datasets": {"d": "/data"}, "metrics_listen": address, "insecure": True}).metrics_listen


def test_a_wrong_address_is_named() -> None:
    with pytest.raises(ConfigError, match="metrics_listen is 'nine'; HOST:PORT"):
        load_config(None, {"datasets": {"d": "/data"}, "metrics_listen": "nine"})


def test_a_defect_is_logged_and_the_endpoint_lives_on(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = server.server._endpoint
    assert endpoint is not None
    with monkeypatch.context() as patch, suppress(OSError, http.client.HTTPException):
        patch.setattr(endpoint._server, "render", lambda: 1 // 0)
        answer(server)
    until(lambda: "metrics cannot be given" in caplog.text)
    assert "ZeroDivisionError" in caplog.text
    assert answer(server)[0] == 200
