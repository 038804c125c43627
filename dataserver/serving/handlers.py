"""From a servicer's methods to gRPC handlers: decoding, encoding, and errors with their reasons, in one place."""

from collections.abc import Callable, Iterator

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from dataserver.serving.errors import abort, service_error

Unary = Callable[[Message, grpc.ServicerContext], Message]
Streaming = Callable[[Message, grpc.ServicerContext], Iterator[bytes]]


def service_handler(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Handlers for all methods of a service.

    Unlike generated registration, a streaming method yields messages that are bytes already, and any exception of a
    method becomes a status with google.rpc.ErrorInfo.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Message, Message]] = {}
    for method in service.methods:
        decode = GetMessageClass(method.input_type).FromString
        behaviour = getattr(servicer, method.name)
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(_guarded_stream(behaviour), decode)
        else:
            encode = GetMessageClass(method.output_type).SerializeToString
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_guarded(behaviour), decode, encode)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _guarded(behaviour: Unary) -> Unary:
    def call(request: Message, context: grpc.ServicerContext) -> Message:
        try:
            response = behaviour(request, context)
        except Exception as error:
            failure = service_error(error)
        else:
            return response
        return abort(context, failure)

    return call


def _guarded_stream(behaviour: Streaming) -> Streaming:
    def call(request: Message, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from behaviour(request, context)
        except Exception as error:
            failure = service_error(error)
        else:
            return
        abort(context, failure)

    return call
