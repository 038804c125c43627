"""A server that knows nothing but the golden transcript: requests that are in it get their answer, byte for byte."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from golden.transcript import SERVICE, Exchange, message_class
from google.rpc import status_pb2
from grpc_status import rpc_status


class _Replay(grpc.GenericRpcHandler):
    def __init__(self, exchanges: Iterable[Exchange]) -> None:
        self._exchanges = list(exchanges)

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        method = details.method.rpartition("/")[2]
        decode = message_class(method, "input_type").FromString
        if SERVICE.methods_by_name[method].server_streaming:
            return grpc.unary_stream_rpc_method_handler(lambda r, c: iter(self._answer(method, r, c)), decode)
        return grpc.unary_unary_rpc_method_handler(lambda r, c: self._answer(method, r, c)[0], decode)

    def _answer(self, method: str, request: Any, context: grpc.ServicerContext) -> list[bytes]:
        for exchange in self._exchanges:
            if (exchange.method, exchange.request) == (method, request):
                if exchange.details:
                    status = status_pb2.Status.FromString(exchange.details)
                    context.abort_with_status(rpc_status.to_status(status))
                return exchange.messages
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not in the transcript: {method} {request}")
        raise AssertionError


@contextmanager
def replaying(exchanges: Iterable[Exchange]) -> Iterator[str]:
    """Serve exchanges on a free port; yields the address."""
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((_Replay(exchanges),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
