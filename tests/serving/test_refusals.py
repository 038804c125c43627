"""Calls that never reach a method: what gRPC would refuse by itself carries a reason and an action all the same."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from serving.harness import TIMEOUT_S, Running, reason_of, running

from dataserver.serving import data_service, wire
from dataserver.serving.limits import MAX_TRANSPORT_BYTES
from dataserver.serving.server import UNARY_THREADS, WATCH_THREADS

CODE = grpc.StatusCode
SERVICE = "/disttrain.v1.DataService"
INVALID = (CODE.INVALID_ARGUMENT, "REQUEST_INVALID", "GIVE_UP")


def call(server: Running, method: str, request: bytes) -> bytes:
    answer: bytes = server.channel.unary_unary(method)(request, timeout=TIMEOUT_S)
    return answer


def refused(server: Running, method: str, request: bytes) -> tuple[grpc.StatusCode, str, str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(server, method, request)
    return reason_of(caught.value)


@pytest.mark.parametrize("request_bytes", [b"\x0a\xff", b"\x0a\x01\xff", b"\xff" * 20])
def test_what_cannot_be_decoded(server: Running, request_bytes: bytes) -> None:
    """A length beyond the end, text that is no UTF-8, no message at all."""
    *status, text = refused(server, f"{SERVICE}/GetOrCreateJob", request_bytes)
    assert tuple(status) == INVALID
    assert text.startswith("the request is no disttrain.v1.GetOrCreateJobRequest: it cannot be decoded")
    with pytest.raises(grpc.RpcError) as caught:
        list(server.channel.unary_stream(f"{SERVICE}/StreamMicrobatches")(request_bytes, timeout=TIMEOUT_S))
    assert reason_of(caught.value)[:3] == INVALID
    assert call(server, f"{SERVICE}/GetServerInfo", b"")


def test_a_request_that_is_too_large(server: Running) -> None:
    """4 MiB are looked at, and found to be no message."""
    assert "it cannot be decoded" in refused(server, f"{SERVICE}/GetPlan", bytes(4 << 20))[3]
    for size in ((4 << 20) + 1, MAX_TRANSPORT_BYTES):
        *status, text = refused(server, f"{SERVICE}/GetPlan", bytes(size))
        assert tuple(status) == INVALID
        assert f"it has {size} bytes; at most 4194304 are allowed" in text


@pytest.mark.parametrize("method", [f"{SERVICE}/GetEverything", "/disttrain.v2.DataService/GetPlan", "/x"])
def test_a_method_that_is_not_there(server: Running, method: str) -> None:
    *status, text = refused(server, method, b"")
    assert tuple(status) == (CODE.UNIMPLEMENTED, "METHOD_UNKNOWN", "ANOTHER_SERVER")
    assert f"no method '{method}'" in text
    with pytest.raises(grpc.RpcError) as caught:
        list(server.channel.stream_stream(method)(iter([b""]), timeout=TIMEOUT_S))
    assert reason_of(caught.value)[1] == "METHOD_UNKNOWN"


def test_one_call_too_many_is_refused_and_a_place_is_free_again(datasets: dict[str, Path]) -> None:
    """Calls that send no request hold their threads; the refusal needs none of them, and no request either."""
    with running(datasets, max_streams=1) as server:
        release = threading.Event()

        def nothing() -> Iterator[bytes]:
            release.wait(TIMEOUT_S)
            yield b""

        def hold() -> grpc.Call:
            return server.channel.stream_unary(f"{SERVICE}/GetServerInfo").future(nothing(), timeout=TIMEOUT_S)

        held = [hold() for _ in range(2 + UNARY_THREADS)]
        with pytest.raises(grpc.RpcError) as caught:
            hold().result()
        assert reason_of(caught.value)[:3] == (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS", "RETRY")
        assert refused(server, f"{SERVICE}/GetServerInfo", b"")[1] == "TOO_MANY_CALLS"
        held[0].cancel()
        release.set()
        for other in held[1:]:
            assert other.result()
        assert call(server, f"{SERVICE}/GetServerInfo", b"")


def test_watching_and_silent_reflection_are_bounded_and_leave_streams_their_places(datasets: dict[str, Path]) -> None:
    with running(datasets, max_streams=1) as server:
        health, release = HealthStub(server.channel), threading.Event()

        def nothing() -> Iterator[ServerReflectionRequest]:
            release.wait(TIMEOUT_S)
            yield from ()

        def watch() -> Any:
            return health.Watch(HealthCheckRequest(), timeout=TIMEOUT_S)

        def ask() -> Any:
            return ServerReflectionStub(server.channel).ServerReflectionInfo(nothing(), timeout=TIMEOUT_S)

        try:
            watches = [watch() for _ in range(WATCH_THREADS // 2)]
            assert all(next(call).status == HealthCheckResponse.SERVING for call in watches)
            silent = [ask() for _ in range(WATCH_THREADS // 2)]
            for one_more in (watch(), ask()):
                with pytest.raises(grpc.RpcError) as caught:
                    next(one_more)
                assert reason_of(caught.value)[:3] == (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS", "RETRY")
            assert all(call.is_active() for call in (*watches, *silent))
            assert not server.server._calls._calls, "none of them holds a thread of other calls"
            assert health.Check(HealthCheckRequest(), timeout=TIMEOUT_S).status == HealthCheckResponse.SERVING
        finally:
            release.set()


@pytest.fixture(scope="module")
def protos() -> DescriptorPool:
    """What a foreign client has: everything in protos/, compiled from there alone."""
    buf, folder = Path(sys.executable).with_name("buf"), Path(__file__).resolve().parents[2] / "protos"
    image = subprocess.run([buf, "build", folder, "--output", "-"], capture_output=True, timeout=60, check=True).stdout
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(image).file:
        pool.Add(file)
    return pool


def test_the_trailer_is_what_the_protos_say(server: Running, protos: DescriptorPool) -> None:
    """Read as a client of another language reads it: a key of the trailing metadata, and the messages of protos/."""
    kinds = [GetMessageClass(protos.FindMessageTypeByName(f"google.rpc.{name}")) for name in ("Status", "ErrorInfo")]
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.GetPlan(pb.GetPlanRequest(job_id="f" * 64), timeout=TIMEOUT_S)
    (encoded,) = [v for k, v in caught.value.trailing_metadata() if k == "grpc-status-details-bin"]
    status = kinds[0].FromString(encoded)
    assert (status.code, status.message) == (CODE.NOT_FOUND.value[0], caught.value.details())
    (detail,) = status.details
    assert detail.type_url == "type.googleapis.com/google.rpc.ErrorInfo"
    info = kinds[1].FromString(detail.value)
    assert (info.domain, info.reason, dict(info.metadata)) == ("disttrain", "JOB_UNKNOWN", {"action": "CREATE_JOB"})


def test_a_codec_that_is_not_known_beside_one_that_is(server: Running) -> None:
    job_id = server.create().job_id
    zstd = server.read(job_id, accepted_codecs=[microbatch_pb2.CODEC_ZSTD])
    assert server.read(job_id, accepted_codecs=[77, microbatch_pb2.CODEC_ZSTD]).blob() == zstd.blob()
    raw = server.read(job_id)
    assert server.read(job_id, accepted_codecs=[microbatch_pb2.CODEC_RAW, 77]).blob() == raw.blob()
    assert {entry.codec for header, _ in raw.microbatches for entry in header.tensors} == {microbatch_pb2.CODEC_RAW}


def test_a_plan_and_a_header_as_large_as_a_message_may_be_and_one_byte_larger(
    datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(datasets) as server:
        job_id = server.create().job_id
        request = pb.GetPlanRequest(job_id=job_id, step=1)
        plan = server.stub.GetPlan(request, timeout=TIMEOUT_S).plan
        monkeypatch.setattr(data_service, "MAX_MESSAGE_BYTES", plan.ByteSize() + data_service.MESSAGE_MARGIN_BYTES)
        assert server.stub.GetPlan(request, timeout=TIMEOUT_S).plan == plan
        least = plan.ByteSize() + data_service.MESSAGE_MARGIN_BYTES - 1
        monkeypatch.setattr(data_service, "MAX_MESSAGE_BYTES", least)
        with pytest.raises(grpc.RpcError) as caught:
            server.stub.GetPlan(request, timeout=TIMEOUT_S)
        *_, action, text = reason_of(caught.value)
        assert action == "GIVE_UP"
        assert (
            f"the plan of step 1 names {len(plan.samples.sample)} samples, more than a message of {least} bytes" in text
        )

        header = next(iter(server.stream(job_id, "llm"))).SerializeToString()
        monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(header))
        assert next(iter(server.stream(job_id, "llm"))).SerializeToString() == header
        monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(header) - 1)
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(server.stream(job_id, "llm")))
        *_, reason, action, text = reason_of(caught.value)
        assert (reason, action) == ("MICROBATCH_TOO_LARGE", "GIVE_UP")
        sizes = rf"{len(header)} bytes, more than the {len(header) - 1} of one"
        assert re.search(rf"the header of microbatch 0 of step 0 names \d+ items in {sizes}", text)


def without_threads(monkeypatch: pytest.MonkeyPatch, prefix: str, count: int) -> None:
    """Let so many threads of a pool fail to start, as beyond a limit of the system."""
    start, left = threading.Thread.start, [None] * count

    def started(thread: threading.Thread) -> None:
        if left and thread.name.startswith(prefix):
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)


@pytest.mark.parametrize(
    ("prefix", "method", "code"),
    [("rpc", "GetPlan", CODE.NOT_FOUND), ("refuse", "NoSuchMethod", CODE.UNIMPLEMENTED)],
)
def test_a_thread_that_cannot_be_started_costs_no_call(
    datasets: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prefix: str,
    method: str,
    code: grpc.StatusCode,
) -> None:
    with running(datasets) as server:
        without_threads(monkeypatch, prefix, 1)
        calls = [server.channel.unary_unary(f"{SERVICE}/{method}").future(b"", timeout=TIMEOUT_S) for _ in range(4)]
        codes = {call.exception(TIMEOUT_S).code() for call in calls}
    assert codes == {code}
    assert "a call waits for another to end (can't start new thread)" in caplog.text


def test_a_stream_that_cannot_begin_takes_no_place(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with running(datasets, max_streams=1) as server:
        job_id = server.create().job_id
        without_threads(monkeypatch, "plan", 2)
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                server.read(job_id)
            assert reason_of(caught.value)[0] is CODE.INTERNAL
        assert server.read(job_id).microbatches
