"""Says to the server of a stream how far the caller is.

A server sees what it has sent, which may wait in buffers of gRPC and of this client. A thread of its own looks at the
caller's step now and then: the caller never wakes another thread for it.
"""

import logging
import secrets
import time
from typing import Final

import grpc
from disttrain.v1.data_service_pb2 import ReportProgressRequest
from google.protobuf.duration_pb2 import Duration

from trainclient.stream.endpoint import CallGuard, Endpoint
from trainclient.stream.errors import ClientError, ClosedError, DataServiceError

SAY_EVERY_S: Final = 1.0
"""A step that has changed since is said, and how long the caller waits."""
ANSWER_S: Final = 5.0
"""A report is answered within that."""

_log = logging.getLogger(__name__)


class ProgressReports:
    """What one caller has taken, for the server it reads from; `run` is the body of a thread."""

    def __init__(self) -> None:
        self.step: int | None = None
        """Step of the microbatch that the caller took last; set by its thread."""
        self._wait: tuple[float, float | None] = 0.0, None
        """Seconds of all waits that are over, and when the one began that is not; replaced as a whole by the caller."""
        self._guard = CallGuard()
        self._stream: tuple[Endpoint, bytes] | None = None
        """Server and token of the open stream; replaced as a whole by the receiving thread."""
        self._silent: set[str] = set()
        """Addresses of servers that do not take reports."""

    @property
    def waited_s(self) -> float:
        """Seconds that the caller has waited for all microbatches so far, the one included that it waits for now."""
        over, since = self._wait
        return over if since is None else over + time.perf_counter() - since

    def begin_wait(self) -> None:
        """Note that the caller asks for a microbatch."""
        self._wait = self._wait[0], time.perf_counter()

    def end_wait(self, taken: bool) -> float:
        """The caller has taken it, or there is none; the seconds that it waited, which count where it has."""
        over, since = self._wait
        waited = 0.0 if since is None else time.perf_counter() - since
        self._wait = over + waited if taken else over, None
        return waited

    def begin_stream(self, endpoint: Endpoint) -> bytes:
        """Report to that server from now on, about the stream of the token that this gives."""
        token = secrets.token_bytes(16)
        self._stream = endpoint, token
        return token

    def end_stream(self) -> None:
        """Report no more until another stream begins."""
        self._stream = None

    def stop(self) -> None:
        """End the thread, and the call that it makes."""
        self._guard.stop()

    def run(self) -> None:
        """Report until `stop`: each step, and again while the caller waits, which is when its waits are looked at.

        A report that fails is said again with the next look, and nothing depends on it.
        """
        said: tuple[bytes, int] | None = None
        try:
            while True:
                self._guard.pause(SAY_EVERY_S)
                stream, step = self._stream, self.step
                if stream is None or step is None or stream[0].address in self._silent:
                    continue
                if said == (stream[1], step) and self._wait[1] is None:
                    continue
                if self._said(*stream, step):
                    said = stream[1], step
        except ClosedError:
            return

    def _said(self, endpoint: Endpoint, token: bytes, step: int) -> bool:
        waited = Duration()
        waited.FromNanoseconds(round(self.waited_s * 1e9))
        request = ReportProgressRequest(progress_token=token, step=step, waited=waited)
        try:
            endpoint.unary(lambda stub: stub.ReportProgress, request, ANSWER_S, self._guard)
        except ClosedError:
            raise
        except ClientError as error:
            if isinstance(error, DataServiceError) and error.code == grpc.StatusCode.UNIMPLEMENTED:
                self._silent.add(endpoint.address)
            _log.debug("progress is not reported: %s", error)
            return False
        return True
