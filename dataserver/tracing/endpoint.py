"""Where spans go: one recorder for each collector that this process sends to."""

import threading
from typing import Final

from dataserver.extras import pip_install
from dataserver.tracing.collector import Collector, TracingError
from dataserver.tracing.spans import Recorder

_recorders: Final[dict[tuple[Collector, str], Recorder]] = {}
_lock: Final = threading.Lock()


def recorder_to(collector: Collector, service: str) -> Recorder:
    """What sends spans of this process to a collector, as a service of that name; the same at each call.

    Raises:
        TracingError: a package is missing, or variables of OpenTelemetry cannot be used.
    """
    with _lock:
        if (found := _recorders.get((collector, service))) is None:
            try:
                from dataserver.tracing.otlp import OtlpRecorder
            except ModuleNotFoundError as error:
                raise TracingError(f"traces need OpenTelemetry ({error}); run {pip_install('otel')}") from None
            found = _recorders[collector, service] = OtlpRecorder(collector, service)
        return found
