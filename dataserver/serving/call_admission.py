"""What every call passes first: is there such a method, and may its pool take another call?

gRPC would refuse both by itself, but without google.rpc.ErrorInfo.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import grpc
from disttrain.v1 import errors_pb2

from dataserver.serving.errors import DataServiceError, abort

if TYPE_CHECKING:  # gRPC's classes cannot be subscripted at run time
    Handler = grpc.RpcMethodHandler[Any, Any]
P = ParamSpec("P")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class LastingPool(ThreadPoolExecutor):
    """Takes work even where no thread can be started for it: gRPC submits in a thread that no error may end."""

    def _adjust_thread_count(self) -> None:
        """Start a thread if none is free. The work is in the queue already, for whichever comes to it first."""
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            _log.warning(
                "a call waits for another to end (%s): allow this server more threads (`ulimit -u`, a container's "
                "limit of processes), or fewer streams",
                error,
            )


class CallPool(LastingPool):
    """One thread for each call that may be in hand. gRPC submits a call as soon as its headers are there."""

    def __init__(self, max_calls: int, calls: str, remedy: str) -> None:
        """Make a pool without threads.

        Args:
            max_calls: calls in hand at most.
            calls: names them in the refusal of one more.
            remedy: what the client or the operator may do then.
        """
        super().__init__(max_calls, "rpc")
        self.refusal = f"this server has {max_calls} {calls} in hand, as many as it may; {remedy}"
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def full(self) -> bool:
        """Whether one more call would have to wait for a thread."""
        with self._lock:
            return self._calls >= self._max_calls

    def submit(self, fn: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Run a call on a thread of the pool, and count it."""
        future = super().submit(fn, *args, **kwargs)
        with self._lock:
            self._calls += 1
        # Added after counting: if the call has ended already, the callback runs here; the count never falls below 0.
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._calls -= 1


@dataclass(frozen=True, slots=True)
class Pooled:
    """A method that gRPC runs in another pool than that of most calls."""

    behaviour: Callable[[Any, grpc.ServicerContext], Any]
    experimental_thread_pool: ThreadPoolExecutor
    """The pool, under the name by which gRPC finds it."""

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Run the call on this thread."""
        return self.behaviour(request, context)


class Refusing(grpc.ServerInterceptor):
    """Ends calls in a thread of its own, so that they take none of a pool."""

    def __init__(self) -> None:
        self._refusing = LastingPool(1, "refuse")

    def close(self) -> None:
        """End the thread."""
        self._refusing.shutdown(wait=False)

    def refusal(self, refuse: Callable[[Iterator[bytes], grpc.ServicerContext], NoReturn]) -> "Handler":
        """The handler of a call that is ended so."""
        # as if requests were streamed: gRPC then does not wait for one, which may never come
        return grpc.stream_unary_rpc_method_handler(Pooled(refuse, self._refusing))


class Admission(Refusing):
    """Refuses calls of unknown methods, and calls beyond what their pool holds, at once and with a reason.

    gRPC asks it in one thread, the one that submits to the pools: between `full` and the submission no other call comes
    in. Calls may end there, which does no harm.
    """

    def __init__(self, calls: CallPool) -> None:
        super().__init__()
        self._calls = calls

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        """The handler of a call, or one that refuses it."""
        handler = continuation(handler_call_details)
        if handler is None:
            return self._refused(
                errors_pb2.ERROR_REASON_METHOD_UNKNOWN,
                f"this server has no method {handler_call_details.method[:128]!r}; it serves disttrain.v1, as its "
                "reflection service tells: correct the name, or run a release that has the method",
            )
        pool = self._pool(handler)
        if pool.full:
            return self._refused(errors_pb2.ERROR_REASON_TOO_MANY_CALLS, pool.refusal)
        return handler

    def _pool(self, handler: "Handler") -> CallPool:
        methods = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
        pools = [getattr(method, "experimental_thread_pool", None) for method in methods]
        return next((pool for pool in pools if isinstance(pool, CallPool)), self._calls)

    def _refused(self, reason: errors_pb2.ErrorReason.ValueType, message: str) -> "Handler":
        error = DataServiceError(reason, message)
        return self.refusal(lambda _requests, context: abort(context, error))
