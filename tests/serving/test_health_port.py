"""The port for health alone."""

import contextlib
import socket
from pathlib import Path

import grpc
import pytest
from builders.authority import Authority, token_file
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2_grpc import HealthStub
from serving.harness import TIMEOUT_S, running

from dataserver.addresses import joined
from dataserver.security import Credentials
from dataserver.serving.config import ConfigError, load_config
from dataserver.serving.health_port import HealthPort

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_probe_needs_no_credentials_and_gets_nothing_else(datasets: dict[str, Path], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    config = {**authority.server(), "token_file": token_file(tmp_path, "alice"), "health_listen": "127.0.0.1:0"}
    with running(datasets, credentials=Credentials(authority.file), **config) as server:
        assert server.server.health_address is not None
        with grpc.insecure_channel(server.server.health_address) as channel:
            probe = HealthStub(channel)
            for name in ("", "disttrain.v1.DataService"):
                request = health_pb2.HealthCheckRequest(service=name)
                assert probe.Check(request, timeout=TIMEOUT_S).status == SERVING
            with pytest.raises(grpc.RpcError) as caught:
                DataServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(grpc.RpcError) as caught:
                HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError) as caught:  # calls that last would keep probes out
                next(probe.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            server.server.drain(0.0)
            with contextlib.suppress(grpc.RpcError):  # it may have ended by then
                assert probe.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status == NOT_SERVING


def test_an_address_that_is_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataserver.serving.binding.RETRY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = joined(*other.getsockname())
        with pytest.raises(ConfigError, match=rf"cannot listen for health on {taken}: .*--health-listen"):
            HealthPort(taken, HealthServicer())


def test_a_probe_may_come_from_anywhere() -> None:
    assert load_config(None, {"datasets": {"d": "/d"}, "health_listen": "0.0.0.0:50052"}).health_listen
    with pytest.raises(ConfigError, match="health_listen is 'here'; HOST:PORT"):
        load_config(None, {"datasets": {"d": "/d"}, "health_listen": "here"})
