"""Where spans go: a collector of OpenTelemetry, one recorder for each that this process sends to."""

from functools import cache
from urllib.parse import urlsplit

from dataserver.addresses import split_address
from dataserver.extras import pip_install
from dataserver.tracing.spans import Recorder


class TracingError(ValueError):
    """Spans cannot be sent; the message says what to change."""


def collector_address(endpoint: str) -> str:
    """The HOST:PORT of a collector's URL.

    Raises:
        TracingError: it is no URL of a collector.
    """
    try:
        found = urlsplit(endpoint)
        if found.scheme in ("http", "https") and not found.path.strip("/") and not found.query and not found.username:
            split_address(found.netloc)
            return found.netloc
    except ValueError:
        pass
    raise TracingError(
        f"the collector of traces is {endpoint[:128]!r}; http://HOST:PORT, or https://HOST:PORT with TLS, is required"
    )


@cache
def recorder_to(endpoint: str, service: str) -> Recorder:
    """What sends spans of this process to a collector, as a service of that name; the same at each call.

    Raises:
        TracingError: the endpoint cannot be used, or a package is missing.
    """
    collector_address(endpoint)
    try:
        from dataserver.tracing.otlp import OtlpRecorder
    except ModuleNotFoundError as error:
        raise TracingError(f"traces need OpenTelemetry ({error}); run {pip_install('otel')}") from None
    return OtlpRecorder(endpoint, service)
