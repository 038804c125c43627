"""The thread that takes data connections in: whatever one peer does, it stays for the others."""

import socket
import ssl
from collections.abc import Iterator

import pytest
from serving.data_connection import MAGIC
from serving.harness import TIMEOUT_S

from dataserver.serving.transport.direct_listener import DirectListener


class GoneContext:
    """Finds each peer gone, as Python's ssl does with one that has reset the connection."""

    def wrap_socket(self, connection: socket.socket, **_: bool) -> ssl.SSLSocket:
        connection.close()
        raise ConnectionResetError(104, "Connection reset by peer")


@pytest.fixture
def listener() -> Iterator[DirectListener]:
    made = DirectListener()
    yield made
    made.close()
    assert made.port is None
    assert made.offer() is None


def test_peers_that_are_gone_leave_the_port_open(listener: DirectListener) -> None:
    port = listener.listen("127.0.0.1", 0, GoneContext)  # type: ignore[arg-type,return-value]
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            assert connection.recv(1) == b""


def test_an_error_that_nobody_foresaw_costs_one_connection(listener: DirectListener) -> None:
    def broken() -> ssl.SSLContext:
        raise RuntimeError("it was not foreseen")

    port = listener.listen("127.0.0.1", 0, broken)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            assert connection.recv(1) == b""
    listener._tls = None
    offered = listener.offer()
    assert offered is not None
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(MAGIC + offered.token)
        assert connection.recv(len(MAGIC)) == MAGIC
        assert offered.await_connection(TIMEOUT_S)
        listener.withdraw(offered)
