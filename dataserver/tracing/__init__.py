"""Traces of sampled steps, for servers and clients; where nobody wants any, a span is one look at a variable."""

from dataserver.tracing.endpoint import TracingError, collector_address, recorder_to
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
    "Context",
    "Kind",
    "Metadata",
    "Recorder",
    "Span",
    "StepTraces",
    "Tracing",
    "TracingError",
    "carried",
    "collector_address",
    "incoming",
    "opened",
    "outgoing",
    "recorder_to",
    "span",
    "within",
]
