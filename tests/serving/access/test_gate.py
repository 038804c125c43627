"""Every call of every service, by everybody: who is let in, and what exists for whom."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from builders.authority import TOKENS, token_file, write
from disttrain.v1 import admin_service_pb2, data_service_pb2, peer_service_pb2
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from disttrain.v1.peer_service_pb2_grpc import PeerServiceStub
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from serving.access.conftest import POLICY, Serve
from serving.harness import FIXED_WINDOW, TIMEOUT_S, Running, job_data, reason_of, receive

from dataserver.fleet.build import build_id
from dataserver.jobs import fill_job
from dataserver.security import Channels, bearer
from dataserver.serving.access.audit import LINES_PER_S, Audit

Calling = Callable[[Running, str | None], grpc.Channel]
SERVICES = [
    *(m.DESCRIPTOR.services_by_name[n] for m, n in (
        (data_service_pb2, "DataService"), (admin_service_pb2, "AdminService"), (peer_service_pb2, "PeerService"),
        (health_pb2, "Health"), (reflection_pb2, "ServerReflection"),
    )),
]  # fmt: skip
METHODS = [
    *((f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
      for service in SERVICES for method in service.methods),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", True, True),
]  # fmt: skip


def answered(channel: grpc.Channel, method: str, streams: bool, streaming: bool) -> str:
    """What comes of a call with an empty request: ok, or the name of a reason, or of gRPC's status."""
    kind = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}
    call = getattr(channel, kind[streams, streaming])(method)
    try:
        found = call(iter([b""]) if streams else b"", timeout=TIMEOUT_S)
        if streaming:
            next(iter(found))
            found.cancel()
    except grpc.RpcError as error:
        found = error
        try:
            return reason_of(error)[1]
        except AssertionError:
            return str(error.code().name)
    return "ok"


def test_nobody_gets_in_without_a_token_that_is_known_or_does_more_than_it_may(serve: Serve, calling: Calling) -> None:
    server = serve()
    wrong = (f"Bearer {'0' * 32}", f"bearer {TOKENS['ops']}", TOKENS["ops"], "Basic b3BzOm9wcw==", "Bearer ")
    plain = calling(server, None)
    nobody = [plain, *(grpc.intercept_channel(plain, _Header(value)) for value in wrong)]
    alice, bob, ops = (
        grpc.intercept_channel(plain, _Header(bearer(TOKENS[name])[1])) for name in ("alice", "bob", "ops")
    )
    found = {}
    for method in METHODS:
        assert {answered(channel, *method) for channel in nobody} == {"UNAUTHENTICATED"}, method
        refused = [answered(channel, *method) in ("PERMISSION_DENIED", "UNAUTHENTICATED") for channel in (alice, bob)]
        found[method[0].rpartition("/")[2]] = tuple(refused)
    metrics = ("GetMetrics", "GetDiagnostics", "ListFailures")
    expected = {name: (name in (*metrics, "Drain"), name not in metrics) for name in found}
    assert found == expected
    assert len(found) > 12
    last = [method for method in METHODS if method[0].endswith("/Drain")]
    for method in (*(m for m in METHODS if m not in last), *last):  # it ends the server
        assert answered(ops, *method) not in ("PERMISSION_DENIED", "UNAUTHENTICATED"), method


class _Header(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds a header to each call."""

    def __init__(self, value: str) -> None:
        self._value = value

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=[("authorization", self._value)]), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _call


def reasons(stub: DataServiceStub, server: Running, job: dict[str, Any]) -> tuple[Any, ...]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=json.dumps(job)), timeout=TIMEOUT_S)
    return reason_of(caught.value)


def test_a_dataset_that_is_not_listed_does_not_exist(serve: Serve, calling: Calling, datasets: dict[str, Path]) -> None:
    """By what a caller sees it cannot tell it from one that was never there."""
    server = serve()
    stub, operator = DataServiceStub(calling(server, "alice")), DataServiceStub(calling(server, "ops"))
    listed = stub.GetDatasetInfo(pb.GetDatasetInfoRequest(), timeout=TIMEOUT_S)
    assert [found.name for found in listed.datasets] == ["pairs"]
    assert len(operator.GetDatasetInfo(pb.GetDatasetInfoRequest(), timeout=TIMEOUT_S).datasets) == 2

    hidden, absent = (reasons(stub, server, job_data(datasets=[{"name": name}])) for name in ("docs", "none"))
    assert hidden[:3] == (grpc.StatusCode.NOT_FOUND, "DATASET_UNKNOWN", "ANOTHER_SERVER")
    assert hidden[3].replace("docs", "none") == absent[3]
    complete = fill_job(job_data(datasets=[{"name": "docs"}]), server.catalog)
    assert reasons(stub, server, complete) == hidden
    assert reasons(stub, server, job_data()) == hidden, "one of two"

    job_id = operator.GetOrCreateJob(
        pb.GetOrCreateJobRequest(job_spec_json=json.dumps(job_data())), timeout=TIMEOUT_S
    ).job_id
    peers = PeerServiceStub(calling(server, "alice"))
    for call, request in (
        (stub.GetPlan, pb.GetPlanRequest(job_id=job_id)),
        (stub.ListStepTimes, pb.ListStepTimesRequest(job_id=job_id)),
        (stub.ReportStepTimes, pb.ReportStepTimesRequest(times=pb.StepTimes(job_id=job_id, module="vit"))),
        (peers.FetchPlan, peer_service_pb2.FetchPlanRequest(job_id=job_id, build=build_id())),
        (lambda r, timeout: list(stub.StreamMicrobatches(r, timeout=timeout)),
         pb.StreamMicrobatchesRequest(job_id=job_id, module="vit")),
    ):  # fmt: skip
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=TIMEOUT_S)
        assert reason_of(caught.value)[:2] == (grpc.StatusCode.NOT_FOUND, "JOB_UNKNOWN"), request
    for name in ("docs", "none"):
        with pytest.raises(grpc.RpcError) as caught:
            stub.DescribeSamples(pb.DescribeSamplesRequest(dataset=name, samples=[0]), timeout=TIMEOUT_S)
        assert reason_of(caught.value)[3].replace("docs", "none") == absent[3]


@pytest.fixture
def reading(serve: Serve, calling: Calling) -> Iterator[tuple[Running, Any]]:
    """A stream of alice's with much to come."""
    server = serve()
    channel = Channels(token=lambda: TOKENS["alice"]).open(server.address, FIXED_WINDOW)
    with channel:
        stub = DataServiceStub(channel)
        text = json.dumps(job_data(datasets=[{"name": "pairs"}], end={"steps": 100_000}))
        job_id = stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S).job_id
        request = pb.StreamMicrobatchesRequest(job_id=job_id, module="vit")
        stream = stub.StreamMicrobatches(request, timeout=TIMEOUT_S)
        assert len(receive(stream, 2).microbatches) == 2
        yield server, stream


def test_a_revoked_token_ends_its_streams_and_no_others(
    reading: tuple[Running, Any], calling: Calling, tmp_path: Path
) -> None:
    server, stream = reading
    token_file(tmp_path, "alice", "peers", "bob")
    assert len(receive(stream, 2).microbatches) == 2
    newer = "f" * 40
    names = "".join(f"{name} {TOKENS[name]}\n" for name in ("bob", "ops", "peers"))
    write(tmp_path / "tokens", f"{names}alice {newer}\n".encode())
    with pytest.raises(grpc.RpcError) as caught:
        receive(stream)
    assert reason_of(caught.value)[:3] == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "ANOTHER_SERVER")
    assert answered(calling(server, "alice"), METHODS[0][0], False, False) == "UNAUTHENTICATED"
    assert answered(calling(server, "ops"), METHODS[0][0], False, False) != "UNAUTHENTICATED"


def test_a_policy_that_shrinks_ends_streams(reading: tuple[Running, Any], policy: Path) -> None:
    _, stream = reading
    rest = {"identities": [i for i in POLICY["identities"] if i["name"] != "trainer-a"]}
    write(policy, yaml.safe_dump(rest).encode())
    with pytest.raises(grpc.RpcError) as caught:
        receive(stream)
    assert reason_of(caught.value)[:2] == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    assert "no identity of this server's policy has token alice" in reason_of(caught.value)[3]


def test_a_dataset_that_is_taken_away_ends_streams_of_it(reading: tuple[Running, Any], policy: Path) -> None:
    _, stream = reading
    rest = [{**i, "datasets": ["docs"]} if i["name"] == "trainer-a" else i for i in POLICY["identities"]]
    write(policy, yaml.safe_dump({"identities": rest}).encode())
    with pytest.raises(grpc.RpcError) as caught:
        receive(stream)
    assert reason_of(caught.value)[:2] == (grpc.StatusCode.NOT_FOUND, "JOB_UNKNOWN")


def test_each_refusal_is_a_line_without_secrets(
    serve: Serve, calling: Calling, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        answered(calling(server, None), "/disttrain.v1.DataService/GetServerInfo", False, False)
        answered(calling(server, "alice"), "/disttrain.v1.AdminService/Drain", False, False)
        reasons(DataServiceStub(calling(server, "alice")), server, job_data(datasets=[{"name": "docs"}]))
        shown = grpc.intercept_channel(calling(server, None), _Header(bearer("x" * 50)[1]))
        answered(shown, "/grpc.health.v1.Health/Check", False, False)
    lines = [record.getMessage() for record in caplog.records if record.name == "dataserver.audit"]
    assert [line.split(" of ")[0] for line in lines] == [
        "refused /disttrain.v1.DataService/GetServerInfo",
        "refused /disttrain.v1.AdminService/Drain",
        "refused dataset docs",
        "refused /grpc.health.v1.Health/Check",
    ]
    assert "trainer-a at ipv4:127.0.0.1:" in lines[2]
    assert not [token for token in (*TOKENS.values(), "x" * 50) if token in caplog.text]


def test_no_stranger_fills_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.5]
    monkeypatch.setattr("dataserver.serving.access.audit.monotonic", lambda: now[0])
    audit = Audit()
    for _ in range(10 * LINES_PER_S):
        audit.write("/m", "ipv4:1", "no\ntoken")
    now[0] = 101.5
    audit.write("/m", "ipv4:1", "x" * 10_000)
    assert len(caplog.records) == LINES_PER_S + 1
    assert "no\\ntoken" in caplog.records[0].getMessage()
    assert caplog.records[-1].getMessage().endswith(f"({9 * LINES_PER_S} refusals before it were not logged)")
    assert len(caplog.records[-1].getMessage()) < 400
    assert audit.refused == 10 * LINES_PER_S + 1


def test_calls_without_a_token_take_no_thread(serve: Serve, calling: Calling) -> None:
    """Calls that never bring their request would else keep as many threads as they like."""
    server = serve()
    channel = calling(server, None)
    open_ended = [channel.stream_unary("/disttrain.v1.DataService/GetServerInfo").future(never()) for _ in range(400)]
    for call in open_ended:
        assert call.exception(TIMEOUT_S).code() is grpc.StatusCode.UNAUTHENTICATED
    assert answered(calling(server, "alice"), "/disttrain.v1.DataService/GetServerInfo", False, False) == "ok"


def never() -> Iterator[bytes]:
    """Requests that do not come."""
    threading.Event().wait(0.5)
    yield from ()
