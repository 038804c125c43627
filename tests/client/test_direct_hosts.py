"""Data connections where the server's name stands for several hosts: to the one that gRPC has reached, or none."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from client.test_direct import digest
from faults.relay import relayed
from fleet.servers import until
from serving.harness import TIMEOUT_S, Running, index, large_job, running
from shards import write_pairs

from dataserver.serving.stream import handing_out
from trainclient.stream.client import ArrayClient

JOB = large_job(global_batch=8, microbatch=4, end={"steps": 3})
OTHER = "127.0.0.2"
"""Another host that the name stands for; nobody listens there."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    photographs = index(write_pairs(tmp_path_factory.mktemp("photographs"), 16, 16, seed=3, median_size=300))
    with running({"photos": photographs}, shared_memory=False) as found:
        yield found


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `localhost` stand for two hosts wherever Python asks; gRPC resolves it by itself, and reaches the server."""
    resolve = socket.getaddrinfo

    def resolved(host: Any, port: Any, *rest: Any, **options: Any) -> list[Any]:
        hosts = (OTHER, "127.0.0.1") if host == "localhost" else (host,)
        return [entry for one in hosts for entry in resolve(one, port, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def read(address: str) -> tuple[list[str], int]:
    """Digests of all microbatches, and how often a data connection was left."""
    with ArrayClient(f"localhost:{address.rpartition(':')[2]}", JOB, "vit", 0) as client:
        return [digest(microbatch) for microbatch in client], client.direct_fallbacks


@pytest.fixture
def chunks(server: Running) -> list[str]:
    """What is sent where nobody asks for a data connection."""
    with ArrayClient(server.address, JOB, "vit", 0) as client:
        client.fleet.avoid_direct.add(server.address)
        return [digest(microbatch) for microbatch in client]


def test_it_goes_to_the_host_that_grpc_has_reached(
    server: Running, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handing_out, "CONNECT_S", TIMEOUT_S)
    before = server.server.metrics()
    assert read(server.address) == (chunks, 0)
    until(lambda: server.server.metrics().direct_bytes - before.direct_bytes > len(chunks) << 20)
    assert server.server.metrics().direct_fallbacks == before.direct_fallbacks


def test_behind_a_proxy_it_cannot_be_told_which_and_payloads_come_over_grpc(
    server: Running, chunks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The server sees a port of the proxy's."""
    before = server.server.metrics()
    with relayed(server.address) as relay:
        assert read(relay.address) == (chunks, 1)
    counts = server.server.metrics()
    assert (counts.direct_fallbacks, counts.direct_bytes) == (before.direct_fallbacks + 1, before.direct_bytes)
    (line,) = [text for text in caplog.messages if "payloads come over gRPC" in text]
    assert "stands for several hosts, and it cannot be told which one gRPC has reached" in line
