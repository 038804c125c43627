"""A server that knows nothing but the golden transcript: requests that are in it get their answer, byte for byte."""

import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from disttrain.v1 import data_service_pb2 as pb
from golden.transcript import MAGIC, SERVICE, Exchange, message_class
from google.rpc import status_pb2
from grpc_status import rpc_status


class _Replay(grpc.GenericRpcHandler):
    def __init__(self, exchanges: Iterable[Exchange], said: list[Any] | None) -> None:
        self._exchanges = list(exchanges)
        self._said = [] if said is None else said

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        method = details.method.rpartition("/")[2]
        decode = message_class(method, "input_type").FromString
        if SERVICE.methods_by_name[method].server_streaming:
            return grpc.unary_stream_rpc_method_handler(lambda r, c: iter(self._answer(method, r, c)), decode)
        return grpc.unary_unary_rpc_method_handler(lambda r, c: self._answer(method, r, c)[0], decode)

    def _answer(self, method: str, request: Any, context: grpc.ServicerContext) -> list[bytes]:
        if isinstance(request, pb.ReportProgressRequest):
            self._said.append(request)
            return [pb.ReportProgressResponse().SerializeToString()]
        if isinstance(request, pb.StreamMicrobatchesRequest) and request.progress_token:
            self._said.append(request.progress_token)
            request.progress_token = b""  # it is drawn by chance
        for exchange in self._exchanges:
            if (exchange.method, exchange.request) == (method, request):
                if exchange.details:
                    status = status_pb2.Status.FromString(exchange.details)
                    context.abort_with_status(rpc_status.to_status(status))
                return _beside_a_data_port(exchange) if exchange.frames else exchange.messages
        if isinstance(request, pb.StreamMicrobatchesRequest) and request.direct:
            request.direct = False  # who has no data port does not see it
            return self._answer(method, request, context)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not in the transcript: {method} {request}")
        raise AssertionError


def _beside_a_data_port(exchange: Exchange) -> list[bytes]:
    """The messages of a stream, whose offer names a port at which its frames are written to whoever has the token."""
    first = pb.StreamMicrobatchesResponse.FromString(exchange.messages[0])
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            if connection.recv(20, socket.MSG_WAITALL) == MAGIC + first.offer.token:
                connection.sendall(MAGIC + exchange.frames)

    threading.Thread(target=serve, daemon=True).start()
    first.offer.port = listener.getsockname()[1]
    return [first.SerializeToString(), *exchange.messages[1:]]


@contextmanager
def replaying(exchanges: Iterable[Exchange], said: list[Any] | None = None) -> Iterator[str]:
    """Serve exchanges on a free port; yields the address.

    Args:
        exchanges: the transcript.
        said: takes the tokens of streams, and what is reported of their progress.
    """
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((_Replay(exchanges, said),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
