"""Asks many servers the same at once; no server's silence delays, or its nonsense ends, the answers of the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc
from disttrain.v1 import admin_service_pb2 as admin
from disttrain.v1 import data_service_pb2 as data
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from dataserver.security import Channels, tls_problem

DOES_NOT_ANSWER: Final = "does not answer"
NO_SERVER: Final = "no server of this release"
"""What is said where something else answers: another program, or another release."""
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[M]):
    """A call of one request and one answer."""

    path: str
    answer: type[M]


def _method(service: ServiceDescriptor, name: str, answer: type[M]) -> Method[M]:
    return Method(f"/{service.full_name}/{service.methods_by_name[name].name}", answer)


_ADMIN: Final = admin.DESCRIPTOR.services_by_name["AdminService"]
_DATA: Final = data.DESCRIPTOR.services_by_name["DataService"]
GET_METRICS: Final = _method(_ADMIN, "GetMetrics", admin.GetMetricsResponse)
GET_DIAGNOSTICS: Final = _method(_ADMIN, "GetDiagnostics", admin.GetDiagnosticsResponse)
LIST_FAILURES: Final = _method(_ADMIN, "ListFailures", admin.ListFailuresResponse)
GET_SERVER_INFO: Final = _method(_DATA, "GetServerInfo", data.GetServerInfoResponse)
GET_DATASET_INFO: Final = _method(_DATA, "GetDatasetInfo", data.GetDatasetInfoResponse)
LIST_STEP_TIMES: Final = _method(_DATA, "ListStepTimes", data.ListStepTimesResponse)


@dataclass(frozen=True, slots=True)
class Reply(Generic[M]):
    """What came of a call to one server."""

    address: str
    message: M | None
    error: grpc.RpcError | DecodeError | None
    """Why there is no message; a DecodeError where what answers is no server of this release."""
    sent_at: float
    """Seconds since 1970, as the next."""
    got_at: float


def ask_all(
    channels: Mapping[str, grpc.Channel], method: Method[M], request: Message, timeout_s: float
) -> Iterator[Reply[M]]:
    """Send a request to all servers at once; their replies, in the order of the servers.

    Takes no longer than one server may. Each reply can be thrown away before the next is read.
    """
    got_at: dict[str, float] = {}

    def noting(address: str) -> Any:
        return lambda _: got_at.setdefault(address, time())

    calls: dict[str, tuple[Any, float]] = {}
    for address, channel in channels.items():
        # Answers stay bytes for gRPC, which would print a traceback of those that cannot be read.
        call: Any = channel.unary_unary(method.path, request_serializer=type(request).SerializeToString)
        sent_at = time()
        calls[address] = call.future(request, timeout=timeout_s), sent_at
        calls[address][0].add_done_callback(noting(address))
    while calls:
        address = next(iter(calls))
        call, sent_at = calls.pop(address)
        message: M | None = None
        error: grpc.RpcError | DecodeError | None = None
        try:
            message = method.answer.FromString(call.result())
        except (grpc.RpcError, DecodeError) as found:
            error = found
        del call  # with the bytes of its answer
        # A result can be had a moment before gRPC calls back.
        yield Reply(address, message, error, sent_at, got_at.setdefault(address, time()))


def why_silent(error: grpc.RpcError | DecodeError) -> str:
    """Why a server gave no answer, in few words."""
    if isinstance(error, DecodeError):
        return NO_SERVER
    code = error.code()
    if (problem := tls_problem(error.details() or "")) is not None:
        return f"refused: {problem}"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return DOES_NOT_ANSWER
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return NO_SERVER
    return f"refuses: {error.details() or code.name}"


class Servers(Protocol):
    """The servers of a fleet, and how channels to them are opened. Thread-safe."""

    @property
    def names(self) -> Sequence[str]:
        """Address of each server, as HOST:PORT."""

    @property
    def version(self) -> int:
        """A number that grows when certificates change."""

    def open(self, name: str, options: Sequence[tuple[str, int | str]] = ()) -> grpc.Channel:
        """A channel to one of them; nothing is connected yet. Raises SecurityError where a token would be shown."""


@dataclass(frozen=True, slots=True)
class NamedServers:
    """Servers that somebody named, all asked with the same credentials."""

    names: Sequence[str]
    channels: Channels

    @property
    def version(self) -> int:
        """A number that grows when certificates change."""
        return self.channels.version

    def open(self, name: str, options: Sequence[tuple[str, int | str]] = ()) -> grpc.Channel:
        """A channel to one of them."""
        return self.channels.open(name, options)


class FleetChannels:
    """A channel to each server; they stay open until servers or certificates change. For one thread at a time."""

    def __init__(self, servers: Servers, options: Sequence[tuple[str, int]] = ()) -> None:
        """Open channels to servers when they are asked for, with these options of gRPC."""
        self._servers, self._options = servers, tuple(options)
        self._opened: dict[str, grpc.Channel] = {}
        self._of: tuple[int, tuple[str, ...]] | None = None

    def opened(self) -> Mapping[str, grpc.Channel]:
        """The open channels by address."""
        of = self._servers.version, tuple(self._servers.names)
        if of != self._of:
            self.close()
            self._opened = {name: self._servers.open(name, self._options) for name in of[1]}
            self._of = of
        return self._opened

    def close(self) -> None:
        """Close the channels that were opened."""
        opened, self._opened, self._of = self._opened, {}, None
        for channel in opened.values():
            channel.close()
