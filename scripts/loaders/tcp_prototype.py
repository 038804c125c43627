"""The least that a data server on a plain TCP connection can be: `tcp_prototype.py SHARDS COUNT DECODER`.

Threads decode batches ahead, arrays are written from where they lie, and the consumer reads them into a ring of buffers
that it uses again. No plans, no order, no checks: what is left of the cost is the kernel's.
"""

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Final

import numpy as np

from loaders.ahead import batches_ahead, run
from loaders.reporting import BATCH

RING: Final = 3
"""Buffers that the consumer reads into, in turn."""
BUFFER_BYTES: Final = 48 << 20
"""Size of each buffer; what is not touched takes no memory."""
LENGTH: Final = struct.Struct("<Q")
PARTS: Final = 64
"""Arrays of one call at most."""


def serve(folder: Path, decoder: str) -> None:
    """Be the server of one consumer, until it or stdin ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for counts, images in batches_ahead(folder, decoder, lambda counts, images: (counts, images)):
        length = counts.nbytes + sum(image.nbytes for image in images)
        parts = [part.data.cast("B") for part in images]
        _send(connection, [memoryview(LENGTH.pack(length)), counts.data.cast("B"), *parts])


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def _send(connection: socket.socket, views: list[memoryview]) -> None:
    while views:
        count = connection.sendmsg(views[:PARTS])
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def batches(port: str) -> Iterator[int]:
    """Images of each batch, for ever."""
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        for buffer in cycle([bytearray(BUFFER_BYTES) for _ in range(RING)]):
            view = memoryview(buffer)[: LENGTH.unpack(connection.recv(LENGTH.size, socket.MSG_WAITALL))[0]]
            done = 0
            while done < len(view):
                done += connection.recv_into(view[done:], len(view) - done, socket.MSG_WAITALL)
            counts = np.frombuffer(view, np.int64, BATCH)
            patches = np.frombuffer(view, np.uint8, offset=counts.nbytes).reshape(counts.sum(), -1)
            assert patches.shape[1]
            yield len(counts)


if __name__ == "__main__":
    run("loaders.tcp_prototype", serve, batches)
