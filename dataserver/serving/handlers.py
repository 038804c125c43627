"""From a servicer's methods to gRPC handlers: decoding, encoding, and errors with their reasons, in one place.

gRPC hands requests over as bytes: one that it failed to decode itself would end without google.rpc.ErrorInfo.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from disttrain.v1 import errors_pb2
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from dataserver.serving.errors import DataServiceError, abort, service_error
from dataserver.serving.limits import MAX_MESSAGE_BYTES

Unary = Callable[[Message, grpc.ServicerContext], Message]
Streaming = Callable[[Message, grpc.ServicerContext], Iterator[bytes]]


def service_handler(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Handlers for all methods of a service.

    Unlike generated registration, a streaming method yields messages that are bytes already, and any exception of a
    method, or of decoding its request, becomes a status with google.rpc.ErrorInfo.
    """
    handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {}
    for method in service.methods:
        kind, behaviour = GetMessageClass(method.input_type), getattr(servicer, method.name)
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(_guarded_stream(behaviour, kind))
        else:
            encode = GetMessageClass(method.output_type).SerializeToString
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _guarded(behaviour, kind), response_serializer=encode
            )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


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
    raise DataServiceError(errors_pb2.ERROR_REASON_REQUEST_INVALID, f"the request is no {name}: {problem}")
