"""What benchmarks and fault runs say of servers whose payloads do not go over data connections."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks.data_connections import require_all_direct, require_none_left, wrong_with
from serving.harness import TIMEOUT_S, Running, index, large_job, running
from shards import write_pairs

from dataserver.serving.stream import handing_out
from trainclient.stream import direct
from trainclient.stream.client import ArrayClient


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("photographs"), 16, 16, seed=3, median_size=300))


def read(server: Running) -> ArrayClient:
    """A client that has read a job."""
    with ArrayClient(server.address, large_job(global_batch=8, microbatch=4, end={"steps": 2}), "vit", 0) as client:
        assert list(client)
    return client


def sending(photographs: Path, **config: Any) -> Any:
    return running({"photos": photographs}, shared_memory=False, **config)


def test_all_is_well_where_payloads_go_over_data_connections(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handing_out, "CONNECT_S", TIMEOUT_S)
    with sending(photographs) as server:
        require_none_left(read(server))
        assert wrong_with(server.address) is None
        require_all_direct(server.address)


def test_servers_without_a_data_port_are_named(photographs: Path) -> None:
    with sending(photographs, direct=False) as server:
        require_none_left(read(server))  # it was offered none
        with pytest.raises(SystemExit, match=rf"^{server.address}: 0 of [\d,]+ bytes went over data connections$"):
            require_all_direct(server.address)


def test_a_data_connection_that_was_left_is_named_on_both_sides(
    photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handing_out, "CONNECT_S", TIMEOUT_S)

    def cut(*_: object) -> None:
        raise direct.DirectError("a test cuts it")

    monkeypatch.setattr(direct, "_fill", cut)
    with sending(photographs) as server:
        with pytest.raises(SystemExit, match="a data connection was left for gRPC"):
            require_none_left(read(server))
        assert "1 streams left their data connections" in str(wrong_with(server.address))
