"""What every call passes before all else: is its caller known, and does it have the right?"""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc

from dataserver.serving.access.access import Access, authorization
from dataserver.serving.access.policy import Right
from dataserver.serving.call_admission import Pooled, Refusing
from dataserver.serving.errors import DataServiceError, abort

if TYPE_CHECKING:  # gRPC's classes cannot be subscripted at run time
    Handler = grpc.RpcMethodHandler[Any, Any]
    Behaviour = Callable[[Any, grpc.ServicerContext], Any]

_ADMIN_SERVICE: Final = "/disttrain.v1.AdminService/"
_TELLING: Final = ("GetMetrics", "GetDiagnostics", "ListFailures")
_NEEDS: Final = {f"{_ADMIN_SERVICE}{method}": Right.METRICS for method in _TELLING}
"""Methods of the admin service that need less than its right."""


class Gate(Refusing):
    """Refuses callers without a token before their call takes a thread, and others as their call begins.

    A stream is checked again at its next message when tokens or policy have changed.
    """

    def __init__(self, access: Access) -> None:
        super().__init__()
        self._access = access

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """The handler of a call, or one that refuses it."""
        if self._access.is_open:
            return continuation(handler_call_details)
        method = handler_call_details.method
        try:
            self._access.token_name(authorization(handler_call_details.invocation_metadata))
        except DataServiceError as error:
            return self._refused(method, error)
        handler = continuation(handler_call_details)
        return None if handler is None else self._guarded(method, handler)

    def _guarded(self, method: str, handler: "Handler") -> "Handler":
        codecs = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary), *codecs)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method, handler.unary_stream), *codecs)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._streaming(method, handler.stream_stream), *codecs)
        if handler.stream_unary is not None:  # a refusal of `Admission`
            return grpc.stream_unary_rpc_method_handler(self._unary(method, handler.stream_unary), *codecs)
        raise TypeError(f"{method} is of no kind that is guarded")  # which refuses the call

    def _unary(self, method: str, behaviour: "Behaviour") -> "Behaviour":
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            self._check(method, context)
            return behaviour(request, context)

        return _in_same_pool(call, behaviour)

    def _streaming(self, method: str, behaviour: "Behaviour") -> "Behaviour":
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            version = self._access.version
            self._check(method, context)
            with closing(behaviour(request, context)) as messages:
                for message in messages:
                    if version != self._access.version:
                        version = self._access.version
                        self._check(method, context)
                    yield message

        return _in_same_pool(call, behaviour)

    def _check(self, method: str, context: grpc.ServicerContext) -> None:
        """End the call unless its caller may make it."""
        try:
            self._access.require(context, needed_right(method))
        except DataServiceError as error:
            self._access.audit.write(method, context.peer(), error.message)
            abort(context, error)

    def _refused(self, method: str, error: DataServiceError) -> "Handler":
        def refuse(_requests: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
            self._access.audit.write(method, context.peer(), error.message)
            abort(context, error)

        return self.refusal(refuse)


def needed_right(method: str) -> Right:
    """The right that a method needs, by its full name."""
    return _NEEDS.get(method, Right.ADMIN if method.startswith(_ADMIN_SERVICE) else Right.READ)


def _in_same_pool(call: "Behaviour", behaviour: "Behaviour") -> "Behaviour":
    pool = getattr(behaviour, "experimental_thread_pool", None)
    return call if pool is None else Pooled(call, pool)
