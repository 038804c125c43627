"""Data connections where gRPC is encrypted: so are they, with the same certificates."""

import socket
import ssl
from pathlib import Path

import pytest
from builders.authority import Authority
from client.test_direct import digest
from fleet.servers import until
from serving.data_connection import MAGIC, exactly, offered, receive_direct, said
from serving.harness import TIMEOUT_S, index, large_job, running
from shards import write_pairs

from dataserver.security import Credentials
from dataserver.serving.stream import handing_out
from dataserver.serving.transport import direct
from trainclient.stream.client import ArrayClient


def test_payloads_are_encrypted_and_strangers_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_out, "CONNECT_S", TIMEOUT_S)
    folder, ours = (
        index(write_pairs(tmp_path / "photos", 16, 16, seed=3, median_size=300)),
        Authority(tmp_path / "ours"),
    )
    job = large_job(global_batch=8, microbatch=4, end={"steps": 2})
    secured = {**ours.server(), "client_ca": ours.file}
    found = []
    with running({"photos": folder}, credentials=ours.client(), shared_memory=False, **secured) as server:
        port = server.server.streams.shared.direct.port
        assert port is not None
        for host in ("127.0.0.1", "localhost"):
            address = f"{host}:{server.address.rpartition(':')[2]}"
            with ArrayClient(address, job, "vit", 0, credentials=ours.client()) as client:
                found.append([digest(microbatch) for microbatch in client])
                assert client.direct_fallbacks == 0
            until(lambda: server.server.metrics().direct_bytes > sum(map(len, found)) << 16)
        with said(port, MAGIC + bytes(16)) as plain:
            assert MAGIC not in exactly(plain, 100)
        other = Authority(tmp_path / "theirs")
        with said(port, b"") as stranger, pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context(cafile=other.file).wrap_socket(stranger, server_hostname="localhost")
    with (
        running({"photos": folder}, shared_memory=False, direct=False) as server,
        ArrayClient(server.address, job, "vit", 0) as client,
    ):
        chunks = [digest(microbatch) for microbatch in client]
    assert found == [chunks, chunks]


def test_a_slow_reader_gets_all_of_an_encrypted_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's writes time out within records, and go on where they were."""
    monkeypatch.setattr(handing_out, "CONNECT_S", TIMEOUT_S)
    monkeypatch.setattr(direct, "LOOK_S", 0.02)
    taken: list[int] = []
    sent = direct._sent

    def counted(connection: socket.socket, views: list[memoryview]) -> int:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # less than a payload
        taken.append(sent(connection, views))
        return taken[-1]

    monkeypatch.setattr(direct, "_sent", counted)
    folder = index(write_pairs(tmp_path / "photos", 16, 16, seed=3, median_size=300))
    ours = Authority(tmp_path / "ours")
    with running({"photos": folder}, credentials=Credentials(ours.file), **ours.server()) as server:
        job_id = server.create(large_job(global_batch=8, microbatch=4, end={"steps": 1})).job_id
        whole = server.read(job_id)
        with offered(server, job_id) as (stream, offer):
            context = ssl.create_default_context(cafile=ours.file)
            plain = socket.create_connection(("127.0.0.1", offer.port), TIMEOUT_S)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            with context.wrap_socket(plain, server_hostname="localhost") as connection:
                connection.sendall(MAGIC + offer.token)
                assert exactly(connection, len(MAGIC)) == MAGIC
                found = receive_direct(stream, connection, lambda _: until(lambda: taken.count(0) >= 3))
        assert (found.blob(), found.end) == (whole.blob(), whole.end)
        assert server.server.metrics().direct_fallbacks == 0
