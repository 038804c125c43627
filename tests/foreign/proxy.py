"""A server in between that changes what a real one sends."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from disttrain.v1.data_service_pb2 import StreamMicrobatchesResponse
from disttrain.v1.data_service_pb2_grpc import (
    DataServiceServicer,
    DataServiceStub,
    add_DataServiceServicer_to_server,
)

Messages = Iterable[StreamMicrobatchesResponse]


class _Proxy(DataServiceServicer):
    def __init__(self, upstream: DataServiceStub, change: Callable[[Messages], Messages], digest: str) -> None:
        self._upstream = upstream
        self._change = change
        self._digest = digest

    def GetOrCreateJob(self, request: Any, _: Any) -> Any:  # noqa: N802
        return self._upstream.GetOrCreateJob(request)

    def GetServerInfo(self, request: Any, _: Any) -> Any:  # noqa: N802
        info = self._upstream.GetServerInfo(request)
        info.content_digest = self._digest or info.content_digest
        return info

    def StreamMicrobatches(self, request: Any, _: Any) -> Iterator[Any]:  # noqa: N802
        request.direct = False  # like a release without it: what comes beside gRPC would not be changed
        yield from self._change(self._upstream.StreamMicrobatches(request))


@contextmanager
def proxy(address: str, change: Callable[[Messages], Messages] = iter, digest: str = "") -> Iterator[str]:
    """Serve what the server at `address` says; yields the proxy's address.

    Args:
        address: the server.
        change: what every stream is passed through.
        digest: a content digest instead of the server's.
    """
    with grpc.insecure_channel(address) as channel:
        server = grpc.server(ThreadPoolExecutor(8))
        add_DataServiceServicer_to_server(_Proxy(DataServiceStub(channel), change, digest), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
