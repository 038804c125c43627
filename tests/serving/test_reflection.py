"""Server reflection under both names, and with the tool that the README names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disttrain.v1 import data_service_pb2 as pb
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from serving.harness import TIMEOUT_S, Running

PACKAGES = ["grpc.reflection.v1", "grpc.reflection.v1alpha"]


def ask(server: Running, package: str, **question: Any) -> ServerReflectionResponse:
    method = server.channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo",
        ServerReflectionRequest.SerializeToString,
        ServerReflectionResponse.FromString,
    )
    (answer,) = method(iter([ServerReflectionRequest(**question)]), timeout=TIMEOUT_S)
    found: ServerReflectionResponse = answer
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_service_is_listed_and_described(server: Running, package: str) -> None:
    names = {s.name for s in ask(server, package, list_services="").list_services_response.service}
    assert names == {
        "disttrain.v1.AdminService",
        "disttrain.v1.DataService",
        "disttrain.v1.PeerService",
        "grpc.health.v1.Health",
        *(f"{p}.ServerReflection" for p in PACKAGES),
    }
    for name in names:
        answer = ask(server, package, file_containing_symbol=name).file_descriptor_response
        files = [FileDescriptorProto.FromString(f) for f in answer.file_descriptor_proto]
        assert [f"{file.package}.{s.name}" for file in files for s in file.service] == [name]
        (service,) = [s for file in files for s in file.service]
        described = {f".{file.package}.{m.name}" for file in files for m in file.message_type}
        assert {kind for m in service.method for kind in (m.input_type, m.output_type)} <= described


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
def test_buf_curl(server: Running, protocol: str) -> None:
    url = f"http://{server.address}/disttrain.v1.DataService/GetServerInfo"
    options = ["--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", protocol]
    buf = Path(sys.executable).with_name("buf")
    found = subprocess.run([buf, "curl", *options, url], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    info = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert json.loads(found.stdout)["contentDigest"] == info.content_digest
