"""Data connections where gRPC is encrypted: so are they, with the same certificates."""

import ssl
from pathlib import Path

import pytest
from builders.authority import Authority
from client.test_direct import digest
from serving.data_connection import MAGIC, exactly, said
from serving.harness import TIMEOUT_S, index, large_job, running
from shards import write_pairs

from dataserver.serving.stream import handing_out
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
                assert client.fleet.direct_bytes > len(found[-1]) << 16
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
