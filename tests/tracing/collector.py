"""A collector of OpenTelemetry: the OTLP service over gRPC, which keeps what it is sent."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class Seen:
    """A span as the collector has it."""

    trace: bytes
    id: bytes
    parent: bytes
    name: str
    service: str
    """And the instance of it."""
    start: int
    end: int
    attributes: dict[str, str | int]
    status: str


@dataclass
class Received(TraceServiceServicer):
    """What came."""

    spans: list[Seen] = field(default_factory=list)
    url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(self, request: ExportTraceServiceRequest, _: grpc.ServicerContext) -> ExportTraceServiceResponse:  # noqa: N802
        with self._lock:
            for resource in request.resource_spans:
                of = {a.key: a.value.string_value for a in resource.resource.attributes}
                service = f"{of['service.name']} {of['service.instance.id']}"
                for scope in resource.scope_spans:
                    for s in scope.spans:
                        attributes = {a.key: a.value.string_value or a.value.int_value for a in s.attributes}
                        ids = s.trace_id, s.span_id, s.parent_span_id
                        times = s.start_time_unix_nano, s.end_time_unix_nano
                        self.spans.append(Seen(*ids, s.name, service, *times, attributes, s.status.message))
        return ExportTraceServiceResponse()

    def parent_of(self, span: Seen) -> Seen:
        """The one span that it belongs to."""
        (found,) = [one for one in self.spans if one.trace == span.trace and one.id == span.parent]
        return found

    def path(self, span: Seen) -> tuple[str, ...]:
        """Names from the root to a span."""
        return (*self.path(self.parent_of(span)), span.name) if span.parent else (span.name,)


@contextmanager
def collecting() -> Iterator[Received]:
    """A collector that listens."""
    server = grpc.server(ThreadPoolExecutor(4))
    collector = Received()
    add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
