"""Odd requests for every method: valid ones with fields put to extremes, or with their bytes harmed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from disttrain.v1 import admin_service_pb2, data_service_pb2, peer_service_pb2
from fuzz.odd_bytes import harmed
from fuzz.odd_values import odd_messages
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from dataserver.serving.limits import MAX_TRANSPORT_BYTES

TIMEOUT_S: Final = 60
ACTIONS: Final = ("RETRY", "ANOTHER_SERVER", "CREATE_JOB", "GIVE_UP")
MOST_MESSAGES: Final = 8
"""Of a stream that are read before it is left."""
METHODS: Final[dict[str, MethodDescriptor]] = {
    f"{service.full_name}/{method.name}": method
    for file in (data_service_pb2, admin_service_pb2, peer_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"  # a valid one ends the server
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it is kept: the method's name, a line break, the bytes of the message."""

    method: str
    body: bytes

    @classmethod
    def of(cls, data: bytes) -> "Request":
        """Read a kept request."""
        method, _, body = data.partition(b"\n")
        return cls(method.decode(), body)

    def __bytes__(self) -> bytes:
        """The form in which it is kept."""
        return self.method.encode() + b"\n" + self.body


def problem(channel: grpc.Channel, request: Request) -> str | None:
    """What is wrong with a server's answer; None if it is an answer, or an error that says what to do."""
    method = METHODS.get(request.method)
    try:
        if method is not None and method.server_streaming:
            call = channel.unary_stream(f"/{request.method}")(request.body, timeout=TIMEOUT_S)
            for _ in zip(range(MOST_MESSAGES), call, strict=False):
                pass
            call.cancel()
        else:
            channel.unary_unary(f"/{request.method}")(request.body, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return problem_of(error, request)
    return None


def problem_of(error: grpc.Call, request: Request) -> str | None:
    """What is wrong with the error that a call ended with; those that come from gRPC itself need no ErrorInfo."""
    too_long = len(request.body) > MAX_TRANSPORT_BYTES and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    bare = request.method.startswith("grpc.") or too_long
    if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"{error.code()}: {error.details()}"
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return None if bare else f"{error.code()} without ErrorInfo: {error.details()}"
    return None if info.metadata["action"] in ACTIONS else f"the action is {info.metadata['action']!r}"


def changed_requests(seeds: Sequence[Request]) -> SearchStrategy[Request]:
    """Valid requests with a few fields changed, or with their bytes harmed."""
    return st.one_of([strategy for seed in seeds for strategy in (_odd_fields(seed), _harmed(seed, seeds))])


def _odd_fields(seed: Request) -> SearchStrategy[Request]:
    message = GetMessageClass(METHODS[seed.method].input_type).FromString(seed.body)
    return odd_messages(message).map(lambda odd: Request(seed.method, odd.SerializeToString()))


def _harmed(seed: Request, others: Sequence[Request]) -> SearchStrategy[Request]:
    return harmed([seed.body], [other.body for other in others]).map(lambda body: Request(seed.method, body))
