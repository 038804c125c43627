"""Which host a connection has reached where its name stands for several."""

import socket
from typing import Any

import pytest
from ports import free_ports

from trainclient.stream import reached_host as module
from trainclient.stream.reached_host import reached_host

NAME = "servers.example"


def names(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Have the name stand for these hosts."""

    def resolved(name: str, port: int, **_: Any) -> list[Any]:
        assert name == NAME
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(module.socket, "getaddrinfo", resolved)


@pytest.mark.parametrize("host", ["192.0.2.7", "::1", "fd00::5"])
def test_a_number_stands_for_itself(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch)
    assert reached_host(f"[{host}]:1" if ":" in host else f"{host}:1", 0) == host


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_name_of_several_hosts_is_the_one_that_the_socket_is_connected_to(
    family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an IPv6 socket speaks IPv4, as gRPC's do."""
    reached = "127.0.0.2" if family == socket.AF_INET else "::ffff:127.0.0.2"
    [port] = free_ports(1)
    with (
        socket.create_server(("127.0.0.2", port)),
        socket.create_server(("127.0.0.1", port)),
        socket.create_connection(("127.0.0.1", port)),
        socket.socket(family) as connection,
    ):
        connection.connect((reached, port))
        names(monkeypatch, "127.0.0.1", "127.0.0.2")
        own = connection.getsockname()[1]
        assert reached_host(f"{NAME}:{port}", own) == "127.0.0.2"
        assert connection.getpeername()[1] == port, "it is still open"
        assert reached_host(f"{NAME}:{port}", 0) is None
        assert reached_host(f"{NAME}:{port + 1}", own) is None


def test_a_name_of_one_host_is_that_host(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, "192.0.2.7", "192.0.2.7")
    assert reached_host(f"{NAME}:1", 0) == "192.0.2.7"


def test_a_name_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch)
    with pytest.raises(OSError, match="not known"):
        reached_host(f"{NAME}:1", 0)
