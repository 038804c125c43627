"""The methods of `AdminService`: failures, diagnostics, drains."""

from collections.abc import Callable
from typing import Final

import grpc
from disttrain.v1 import admin_service_pb2 as pb

from dataserver.serving.errors import invalid_request
from dataserver.serving.metrics_message import TakeMetrics

MAX_GRACE_S: Final = 3600
DEFAULT_GRACE_S: Final = 30


class AdminService:
    """Administration of this server; see admin_service.proto."""

    def __init__(
        self,
        drain: Callable[[float], int],
        metrics: TakeMetrics,
        diagnostics: Callable[[], pb.GetDiagnosticsResponse],
        failures: Callable[[grpc.ServicerContext], pb.ListFailuresResponse],
    ) -> None:
        """Make the service.

        Args:
            drain: begins a drain with a grace in seconds and returns the number of open streams.
            metrics: the numbers of this server.
            diagnostics: what it is set up like.
            failures: what failed lately, as far as the caller may see it.
        """
        self._drain = drain
        self._metrics = metrics
        self._diagnostics = diagnostics
        self._failures = failures

    def GetMetrics(self, _request: pb.GetMetricsRequest, _: grpc.ServicerContext) -> pb.GetMetricsResponse:  # noqa: N802
        """Say what the server did and holds."""
        return self._metrics()

    def GetDiagnostics(  # noqa: N802
        self, _request: pb.GetDiagnosticsRequest, _: grpc.ServicerContext
    ) -> pb.GetDiagnosticsResponse:
        """Say what the server is set up like."""
        return self._diagnostics()

    def ListFailures(  # noqa: N802
        self, _request: pb.ListFailuresRequest, context: grpc.ServicerContext
    ) -> pb.ListFailuresResponse:
        """Answer with the calls and samples that failed lately."""
        return self._failures(context)

    def Drain(self, request: pb.DrainRequest, _: grpc.ServicerContext) -> pb.DrainResponse:  # noqa: N802
        """Begin to drain the server, and return how many streams are open."""
        grace_s: float = DEFAULT_GRACE_S
        if request.HasField("grace"):
            grace_s = request.grace.seconds + request.grace.nanos / 1e9
        if not 0 <= grace_s <= MAX_GRACE_S:
            raise invalid_request(
                f"grace is {grace_s} s; a duration from 0 to {MAX_GRACE_S} s is required",
            )
        return pb.DrainResponse(open_streams=self._drain(grace_s))
