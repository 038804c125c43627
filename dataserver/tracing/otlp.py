"""Sends spans to a collector by OTLP over gRPC, with OpenTelemetry's SDK.

Of its variables of the environment those hold that say how a collector is reached: OTEL_EXPORTER_OTLP_HEADERS,
_CERTIFICATE, _CLIENT_CERTIFICATE, _CLIENT_KEY and _COMPRESSION, or with OTEL_EXPORTER_OTLP_TRACES_ in front.
"""

import os
import socket
import threading
import weakref
from importlib.metadata import version
from pathlib import Path
from typing import Final

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from dataserver.security import SecurityError, load_authorities, load_pair
from dataserver.tracing.collector import Collector, TracingError
from dataserver.tracing.spans import Finished, Kind

BATCH: Final = 512
"""Spans that are sent at once."""
EVERY_S: Final = 1.0
"""What waits is sent so often."""
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

    def __init__(self, collector: Collector, service: str) -> None:
        """Begin a thread that sends.

        Raises:
            TracingError: variables of OpenTelemetry cannot be used.
        """
        release = version("disttrain")
        self._scope = InstrumentationScope("disttrain", release)
        credentials = _credentials() if collector.secure else None
        try:
            self._resource = _resource(service, release)
            self._processor = _processor(collector, credentials)
        except Exception as error:  # of whatever class
            raise TracingError(
                f"OpenTelemetry cannot be set up ({error}); correct or unset the variables OTEL_... of the environment"
            ) from error
        # By a finalizer: at the end of the process these run in the reverse of their order, so that readers, which are
        # younger, have recorded their last step before.
        self._closing = _Closing(self._processor)
        self.close = weakref.finalize(self, self._closing.close)
        """Send what is queued, for at most `CLOSE_S`: a collector may not answer. A second time changes nothing."""

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

    @staticmethod
    def _context(trace_id: int, span_id: int) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)


class _Closing:
    """Shuts a processor down in a thread of its own, which begins now: at the end of a process none may begin."""

    def __init__(self, processor: BatchSpanProcessor) -> None:
        self._processor, self._pid = processor, os.getpid()
        self._wanted, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="last-spans", daemon=True).start()

    def close(self) -> None:
        """Do it, and wait for `CLOSE_S` at most; a fork has no such thread, and no spans of its own."""
        if os.getpid() == self._pid:
            self._wanted.set()
            self._done.wait(CLOSE_S)

    def _run(self) -> None:
        self._wanted.wait()
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        self._done.set()


def _resource(service: str, release: str) -> Resource:
    instance = f"{socket.gethostname()}:{os.getpid()}"
    return Resource.create({"service.name": service, "service.instance.id": instance, "service.version": release})


def _processor(collector: Collector, credentials: grpc.ChannelCredentials | None) -> BatchSpanProcessor:
    exporter = OTLPSpanExporter(
        endpoint=collector.address, insecure=not collector.secure, credentials=credentials, timeout=SEND_S
    )
    return BatchSpanProcessor(
        exporter,
        max_queue_size=QUEUED,
        schedule_delay_millis=EVERY_S * 1000,
        max_export_batch_size=BATCH,
        export_timeout_millis=SEND_S * 1000,
    )


def _credentials() -> grpc.ChannelCredentials:
    """By what to know the collector, and what to show it. OpenTelemetry would log a file that is missing, and go on."""
    authorities, certificate, key = map(_file, ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"))
    if (certificate is None) != (key is None):
        raise TracingError(
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY belong together, and one is "
            "missing; give both, or neither"
        )
    try:
        pair = None
        if certificate is not None and key is not None:
            pair = load_pair(certificate, key, for_server=False, for_client=True)
        shown = (None, None) if pair is None else (pair.key, pair.chain)
        return grpc.ssl_channel_credentials(None if authorities is None else load_authorities(authorities), *shown)
    except SecurityError as error:
        raise TracingError(f"the connection to the collector of traces cannot be set up: {error}") from None


def _file(name: str) -> Path | None:
    """The file that a variable names, for traces or for all that is sent."""
    given = os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")
    return Path(given) if given else None
