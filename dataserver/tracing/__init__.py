"""Traces of sampled steps, for servers and clients; where nobody wants any, a span is one look at a variable."""

from dataserver.tracing.collector import Collector, TracingError
from dataserver.tracing.endpoint import recorder_to
from dataserver.tracing.spans import (
    Context,
    Kind,
    Metadata,
    Recorder,
    Span,
    carried,
    incoming,
    opened,
    outgoing,
    span,
    within,
)
from dataserver.tracing.steps import DEFAULT_EVERY, StepTraces, Tracing

__all__ = [
    "DEFAULT_EVERY",
    "Collector",
    "Context",
    "Kind",
    "Metadata",
    "Recorder",
    "Span",
    "StepTraces",
    "Tracing",
    "TracingError",
    "carried",
    "incoming",
    "opened",
    "outgoing",
    "recorder_to",
    "span",
    "within",
]
