"""Whether payloads went over data connections: where nothing is broken, all do but for the first of a stream."""

from typing import Any, Final

from disttrain.v1.admin_service_pb2 import GetMetricsRequest
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub

from dataserver.security import NO_CREDENTIALS, Channels, Credentials
from trainclient.stream.client import ViewClient

MOST: Final = 0.5
"""Share of what a server has sent that may come as chunks: those of a first microbatch, where its stream's connection
took too long."""
TIMEOUT_S: Final = 60.0


def wrong_with(address: str, credentials: Credentials = NO_CREDENTIALS) -> str | None:
    """What is wrong with how a server, whose clients share no memory with it, has sent payloads; None if nothing is."""
    with Channels(credentials).open(address) as channel:
        counts = AdminServiceStub(channel).GetMetrics(GetMetricsRequest(), timeout=TIMEOUT_S)
    if counts.direct_fallbacks:
        return f"{address}: {counts.direct_fallbacks} streams left their data connections for gRPC; its log says why"
    if counts.direct_bytes <= MOST * counts.sent_bytes:
        return f"{address}: {counts.direct_bytes:,} of {counts.sent_bytes:,} bytes went over data connections"
    return None


def require_all_direct(address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
    """End a benchmark where something is wrong with how a server has sent payloads."""
    if (wrong := wrong_with(address, credentials)) is not None:
        raise SystemExit(wrong)


def require_none_left(*clients: ViewClient[Any]) -> None:
    """End a benchmark where a client has left a data connection."""
    if any(client.direct_fallbacks for client in clients):
        raise SystemExit("a data connection was left for gRPC: see the warning above")
