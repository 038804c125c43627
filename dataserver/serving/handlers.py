"""From a servicer's methods to gRPC handlers: decoding, encoding, and errors with their reasons, in one place.

gRPC hands requests over as bytes: one that it failed to decode itself would end without google.rpc.ErrorInfo.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from dataserver.serving.call_admission import CallPool, Pooled
from dataserver.serving.errors import abort, invalid_request, service_error
from dataserver.serving.limits import MAX_MESSAGE_BYTES

_KINDS: "Final[Mapping[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]]]" = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether the client streams, and whether the server does."""

Unary = Callable[[Message, grpc.ServicerContext], Message]
Streaming = Callable[[Message, grpc.ServicerContext], Iterator[bytes]]


def service_handler(
    service: ServiceDescriptor, servicer: object, pool: CallPool | None = None
) -> grpc.GenericRpcHandler:
    """Handlers for all methods of a service.

    Unlike generated registration, a streaming method yields messages that are bytes already, and any exception of a
    method, or of decoding its request, becomes a status with google.rpc.ErrorInfo.

    Args:
        service: describes it.
        servicer: has its methods.
        pool: where its unary calls run; by default where most calls do.
    """
    handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {}
    for method in service.methods:
        kind, behaviour = GetMessageClass(method.input_type), getattr(servicer, method.name)
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(_guarded_stream(behaviour, kind))
        else:
            encode = GetMessageClass(method.output_type).SerializeToString
            call = _guarded(behaviour, kind)
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                call if pool is None else Pooled(call, pool), response_serializer=encode
            )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def standard_handler(
    service: ServiceDescriptor, servicer: object, otherwise: Message, streams: CallPool | None, name: str | None = None
) -> grpc.GenericRpcHandler:
    """Handlers for a service of gRPC's own packages, with generated messages.

    Left to gRPC, a request that cannot be decoded leaves a traceback in the log, and of a streaming method a call that
    never ends, which keeps the server from ending.

    Args:
        service: describes it.
        servicer: has its methods.
        otherwise: the request that one that cannot be decoded is taken for; the service answers it with an error.
        streams: where calls of its streaming methods run. They last as long as their clients like, and would leave no
            thread for others. None serves none of them.
        name: of the service, where it is another one than the description's.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        if method.server_streaming and streams is None:
            continue
        behaviour = getattr(servicer, method.name)
        handlers[method.name] = _KINDS[method.client_streaming, method.server_streaming](
            # wrapped, Health.Watch loses its mark of gRPC's for calls without a thread, which nothing bounds
            Pooled(behaviour, streams) if method.server_streaming and streams is not None else behaviour,
            request_deserializer=_lenient(GetMessageClass(method.input_type), otherwise),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(name or service.full_name, handlers)


def _lenient(kind: type[Message], otherwise: Message) -> Callable[[bytes], Message]:
    def decode(request: bytes) -> Message:
        try:
            return kind.FromString(request)
        except DecodeError:
            return otherwise

    return decode


def _guarded(behaviour: Unary, kind: type[Message]) -> Callable[[bytes, grpc.ServicerContext], Message]:
    def call(request: bytes, context: grpc.ServicerContext) -> Message:
        try:
            response = behaviour(_decoded(request, kind), context)
        except Exception as error:
            failure = service_error(error)
        else:
            return response
        return abort(context, failure)

    return call


def _guarded_stream(
    behaviour: Streaming, kind: type[Message]
) -> Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]:
    def call(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from behaviour(_decoded(request, kind), context)
        except Exception as error:
            failure = service_error(error)
        else:
            return
        abort(context, failure)

    return call


def _decoded(request: bytes, kind: type[Message]) -> Message:
    if len(request) > MAX_MESSAGE_BYTES:
        problem = f"it has {len(request)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
    else:
        try:
            return kind.FromString(request)
        except DecodeError:
            problem = "it cannot be decoded; generate the client from the protos of this release"
    name = kind.DESCRIPTOR.full_name
    raise invalid_request(f"the request is no {name}: {problem}")
