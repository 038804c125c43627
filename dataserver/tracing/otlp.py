"""Sends spans to a collector by OTLP over gRPC, with OpenTelemetry's SDK.

Its variables of the environment hold, such as OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE.
"""

import atexit
import os
import socket
import threading
from importlib.metadata import version
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from dataserver.tracing.spans import Finished, Kind

QUEUED: Final = 8192
"""Spans that wait to be sent; of more, the oldest are dropped, and the log says so."""
SEND_S: Final = 5.0
"""Time for a batch of spans, with all its retries."""
CLOSE_S: Final = 2.0
"""What the end of the process waits for the last spans."""

_KINDS: Final = {
    Kind.INTERNAL: SpanKind.INTERNAL,
    Kind.CLIENT: SpanKind.CLIENT,
    Kind.SERVER: SpanKind.SERVER,
}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class OtlpRecorder:
    """Fulfils `Recorder`: puts spans in a queue, from which a thread sends them; whatever the collector does."""

    def __init__(self, endpoint: str, service: str) -> None:
        instance = f"{socket.gethostname()}:{os.getpid()}"
        attributes = {"service.name": service, "service.instance.id": instance, "service.version": version("disttrain")}
        self._resource = Resource.create(attributes)
        self._scope = InstrumentationScope("disttrain", attributes["service.version"])
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=SEND_S)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=QUEUED, schedule_delay_millis=1000)
        atexit.register(self.close)

    def record(self, finished: Finished) -> None:
        """Put a span in the queue."""
        parent = None if finished.parent_id == 0 else self._context(finished.trace_id, finished.parent_id)
        span = ReadableSpan(
            name=finished.name,
            context=self._context(finished.trace_id, finished.span_id),
            parent=parent,
            resource=self._resource,
            attributes={f"disttrain.{name}": value for name, value in finished.attributes.items()},
            kind=_KINDS[finished.kind],
            status=Status(StatusCode.ERROR, finished.error) if finished.error else Status(StatusCode.UNSET),
            start_time=finished.start_ns,
            end_time=finished.end_ns,
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    def close(self) -> None:
        """Send what is queued, for at most `CLOSE_S`: a collector may not answer."""
        ending = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    @staticmethod
    def _context(trace_id: int, span_id: int) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
