"""The least that a data server in Python can be: `grpc_prototype.py SHARDS COUNT DECODER`.

Threads decode batches ahead, each becomes one message of a server stream without protobuf, and the consumer reads its
arrays from the message in place. No plans, no order, no checks: what is left of the cost is gRPC's and Python's.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc
import numpy as np
from numpy.typing import NDArray

from loaders.ahead import batches_ahead, run
from loaders.common import U8
from loaders.reporting import BATCH

METHOD: Final = "/prototype/Batches"
OPTIONS: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def encoded(counts: NDArray[np.int64], images: list[U8]) -> bytes:
    """A batch: how many patches each image has, and then all patches."""
    return b"".join((counts.data, *(image.data for image in images)))


def serve(folder: Path, decoder: str) -> None:
    """Be the server until the end of stdin."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
        lambda _request, _context: batches_ahead(folder, decoder, encoded)
    )
    service, _, method = METHOD[1:].partition("/")
    server = grpc.server(ThreadPoolExecutor(1), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()


def batches(port: str) -> Iterator[int]:
    """Images of each batch, for ever."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel:
        stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        for message in stream(b""):
            counts = np.frombuffer(message, np.int64, BATCH)
            patches = np.frombuffer(message, np.uint8, offset=counts.nbytes).reshape(counts.sum(), -1)
            assert patches.shape[1]
            yield len(counts)


if __name__ == "__main__":
    run("loaders.grpc_prototype", serve, batches)
