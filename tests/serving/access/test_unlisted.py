"""A dataset that the policy does not list: no method of any service tells it from one that was never there."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from benchmarks.range_server import State
from builders.authority import TOKENS, token_file, write
from disttrain.v1 import admin_service_pb2, data_service_pb2, peer_service_pb2
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.peer_service_pb2 import FetchPiecesRequest, FetchPlanRequest, ObjectPieces
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from serving.harness import TIMEOUT_S, Running, index, job_data, reason_of, running
from stores import no_stores, stores

from dataserver.dataset.storage.pieces import BlockKey
from dataserver.dataset.storage.registry import remote_storage
from dataserver.dataset.storage.urls import Url
from dataserver.fleet.build import build_id
from dataserver.security import Channels
from dataserver.serving.failures import FailureKind

__all__ = ["no_stores", "stores"]

METHODS: dict[str, MethodDescriptor] = {
    method.name: method
    for module, service in (
        (data_service_pb2, "DataService"),
        (admin_service_pb2, "AdminService"),
        (peer_service_pb2, "PeerService"),
    )
    for method in module.DESCRIPTOR.services_by_name[service].methods
}
NAMELESS = {"GetServerInfo", "GetDatasetInfo", "Greet", "GetMetrics", "GetDiagnostics", "ListFailures"}
"""Requests of these name no dataset and no job: their answers may not either."""
OF_A_STREAM = {"ReportProgress", "EndDirect"}
"""These name a stream, by a secret that its reader drew."""
LAST = {"Drain"}
POLICY = {
    "identities": [
        {"name": "team", "token": "alice", "datasets": ["pairs"], "rights": ["read", "metrics"]},
        {"name": "operator", "token": "ops", "datasets": ["*"], "rights": ["admin"]},
    ]
}


def job_text(dataset: str) -> str:
    return json.dumps(job_data(datasets=[{"name": dataset}]))


def requests_of(dataset: str, job_id: str, piece: bytes) -> dict[str, Message]:
    """A request about a dataset of every method that can name one, by itself, a job over it, or an object of it."""
    return {
        "GetOrCreateJob": pb.GetOrCreateJobRequest(job_spec_json=job_text(dataset)),
        "StreamMicrobatches": pb.StreamMicrobatchesRequest(job_id=job_id, module="vit"),
        "GetPlan": pb.GetPlanRequest(job_id=job_id),
        "ReportStepTimes": pb.ReportStepTimesRequest(times=pb.StepTimes(job_id=job_id, module="vit")),
        "ListStepTimes": pb.ListStepTimesRequest(job_id=job_id),
        "DescribeSamples": pb.DescribeSamplesRequest(dataset=dataset, samples=[0]),
        "FetchPlan": FetchPlanRequest(job_id=job_id, build=build_id()),
        "FetchPieces": FetchPiecesRequest(objects=[ObjectPieces(object=piece, start=[0], length=[1])]),
    }


Call = Callable[[str, str, Message], tuple[Any, ...]]


@pytest.fixture
def server(datasets: dict[str, Path], stores: tuple[State, str], tmp_path: Path) -> Iterator[Running]:
    """A server of a dataset on disk, and of `docs` in a bucket, so that it has pieces for its peers."""
    stores[0].put_folder("/bucket/docs", datasets["docs"])
    there = {"pairs": datasets["pairs"], "docs": index(Url("s3:/bucket/docs"))}
    policy = write(tmp_path / "policy.yaml", yaml.safe_dump(POLICY).encode())
    with running(there, token_file=token_file(tmp_path, "alice", "ops"), policy=policy) as found:
        yield found


@pytest.fixture
def call(server: Running) -> Iterator[Call]:
    """Calls a method as somebody: ("ok", answer), or what `reason_of` finds."""
    with (
        Channels(token=lambda: TOKENS["alice"]).open(server.address) as alice,
        Channels(token=lambda: TOKENS["ops"]).open(server.address) as ops,
    ):
        channels = {"alice": alice, "ops": ops}

        def called(name: str, method: str, request: Message) -> tuple[Any, ...]:
            about = METHODS[method]
            path, channel = f"/{about.containing_service.full_name}/{method}", channels[name]
            kind = channel.unary_stream if about.server_streaming else channel.unary_unary
            bound: Any = kind(path, type(request).SerializeToString, GetMessageClass(about.output_type).FromString)
            try:
                answer = bound(request, timeout=TIMEOUT_S)
                if about.server_streaming:
                    message = next(iter(answer))
                    answer.cancel()
                    return "ok", message
            except grpc.RpcError as error:
                return reason_of(error)
            return "ok", answer

        yield called


def test_every_method_answers_as_if_it_were_not_there(server: Running, call: Call) -> None:
    answer = call("ops", "GetOrCreateJob", pb.GetOrCreateJobRequest(job_spec_json=job_text("docs")))[1]
    store = remote_storage(Url("s3:/bucket")).store(Url("s3:/bucket"))
    docs = server.catalog.datasets["docs"]
    piece = BlockKey(store.name, store.head(f"docs/{docs.shards[0].name}"), 0).object_digest
    there = requests_of("docs", answer.job_id, piece)
    none = requests_of("none", "0" * 64, bytes(32))
    assert there.keys() | NAMELESS | OF_A_STREAM | LAST == METHODS.keys(), "each method is in one of these"
    for method, request in there.items():
        assert call("ops", method, request)[0] == "ok", method
        code, reason, action, text = call("alice", method, request)
        assert code is grpc.StatusCode.NOT_FOUND, method
        shown = text.replace("docs", "none").replace(answer.job_id, "0" * 64)
        assert (code, reason, action, shown) == call("alice", method, none[method])


def test_no_answer_names_it(server: Running, call: Call) -> None:
    docs = server.catalog.datasets["docs"]
    job_id = call("ops", "GetOrCreateJob", pb.GetOrCreateJobRequest(job_spec_json=job_text("docs")))[1].job_id
    server.server._metrics.failures.note(FailureKind.IMAGE, "docs", docs, 0, 0, "broken")
    names = [b"docs", docs.fingerprint.encode(), job_id.encode(), docs.shards[0].name.encode()]
    found = {}
    for method in sorted(NAMELESS):
        request = GetMessageClass(METHODS[method].input_type)()
        for name in ("alice", "ops"):
            outcome, answer = call(name, method, request)
            assert outcome == "ok", method
            found[method, name] = [one for one in names if one in answer.SerializeToString()]
    assert {method for (method, name), shown in found.items() if name == "alice" and shown} == set()
    assert {method for (method, name), shown in found.items() if name == "ops" and shown} == {
        "GetDatasetInfo",
        "ListFailures",
    }
