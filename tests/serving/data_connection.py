"""The client's end of a data connection, as the proto describes it and with the generated classes only."""

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from crc32c import crc32c as crc32c_of
from disttrain.v1 import data_service_pb2 as pb
from serving.harness import TIMEOUT_S, Received, Running

MAGIC = b"DTD1"
FRAME = struct.Struct("<QIIQ")


def said(port: int, hello: bytes, host: str = "127.0.0.1") -> socket.socket:
    """A connection on which these bytes were said."""
    connection = socket.create_connection((host, port), TIMEOUT_S)
    connection.sendall(hello)
    return connection


def exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer where the other side ends before."""
    found = bytearray()
    while len(found) < count:
        try:
            piece = connection.recv(count - len(found))
        except ConnectionResetError:
            break
        if not piece:
            break
        found += piece
    return bytes(found)


def connected(offer: pb.DirectOffer) -> socket.socket:
    """A connection whose token was taken."""
    connection = said(offer.port, MAGIC + offer.token)
    assert exactly(connection, 4) == MAGIC
    return connection


@contextmanager
def offered(server: Running, job_id: str, module: str = "vit", rank: int = 0, **request: Any) -> Iterator[Any]:
    """A stream and its offer, which is nobody's yet."""
    stream = server.stream(job_id, module, rank, direct=True, **request)
    first = next(stream)
    assert first.WhichOneof("message") == "offer"
    assert len(first.offer.token) == 16
    try:
        yield stream, first.offer
    finally:
        stream.cancel()


def receive_direct(stream: Any, connection: socket.socket, then: Callable[[Any], object] = lambda _: None) -> Received:
    """Read a stream to its end, and check the framing on both connections.

    Args:
        stream: behind its offer.
        connection: where payloads come.
        then: called with each header.
    """
    found, header, body = Received(), None, bytearray()
    for message in stream:
        kind = message.WhichOneof("message")
        if kind == "end":
            assert header is None, "the end within a microbatch"
            found.end = message.end
            continue
        if kind == "header":
            assert header is None, "a header within a microbatch"
            header, body = message.header, bytearray()
            then(header)
            if message.direct:
                assert header.total_bytes > 0
                frame = FRAME.unpack(exactly(connection, FRAME.size))
                assert frame == (header.step, header.microbatch, header.crc32c, header.total_bytes)
                body += exactly(connection, header.total_bytes)
        else:
            assert kind == "chunk"
            assert header is not None
            body += message.chunk
        if len(body) == (0 if header.withheld else header.total_bytes):
            assert crc32c_of(bytes(body)) == header.crc32c
            found.microbatches.append((header, bytes(body)))
            header = None
    assert header is None, "the stream was cut"
    return found
