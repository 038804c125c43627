"""The direct transport: payloads are written to a TCP connection of their own, from the memory that they were made in.

gRPC keeps headers, their order, ends and errors. The consumer decides: it opens the connection (`direct_listener`), and
if it finds anything wrong with it, it says so by a call, and the stream restarts with chunks. So nothing that was
written waits to be acknowledged, and this side only writes.
"""

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from typing import Final

from dataserver.serving.transport.interface import EncodedMicrobatch

LOOK_S: Final = 0.1
"""A write that cannot go on for so long looks whether it still should."""
PROGRESS_BYTES: Final = 1 << 20
"""A consumer that has taken so many bytes, as many as a chunk has, is not idle."""
FIELD: Final = b"\x38\x01"
"""`direct = true` of StreamMicrobatchesResponse, to be put behind its header."""

_FRAME: Final = struct.Struct("<QIIQ")
"""Step, microbatch, CRC-32C and bytes of the payload that follows."""
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds and probes: what lies between must not forget a connection while a trainer evaluates."""


class DirectTransport:
    """The data connection of one stream, from its offer to its end. Thread-safe."""

    def __init__(self, token: bytes, port: int) -> None:
        """No connection yet.

        Args:
            token: by which its consumer's connection is known.
            port: where it is expected.
        """
        self.token = token
        self.port = port
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._writing = False
        self._ended = False

    def attach(self, connection: socket.socket) -> None:
        """Take the connection on which the token was said."""
        with self._changed:
            if self._ended:
                connection.close()
                return
            # Blocking, with a limit in the kernel: a whole payload is one call, which needs the interpreter once.
            if isinstance(connection, ssl.SSLSocket):
                connection.settimeout(LOOK_S)
            else:
                connection.settimeout(None)
                limit = struct.pack("ll", 0, int(LOOK_S * 1e6))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            self._connection = connection
            self._changed.notify_all()

    def await_connection(self, timeout_s: float) -> bool:
        """Wait at most so long until there is a connection, or will be none; whether there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._connection is not None, timeout_s)
            return self._connection is not None and not self._ended

    def write(
        self,
        cursor: tuple[int, int],
        encoded: EncodedMicrobatch,
        progressed: Callable[[], object],
        is_over: Callable[[], bool],
    ) -> bool:
        """Write the frame of a microbatch; whether all of it was written.

        Args:
            cursor: step and microbatch.
            encoded: its payload is written from where it lies, and left alone after this call.
            progressed: called for each MiB that the consumer took.
            is_over: whether the stream ends, so that nothing more is to be written.
        """
        with self._changed:
            if self._connection is None or self._ended:
                return False
            connection, self._writing = self._connection, True
        payload = encoded.payload
        views = [memoryview(_FRAME.pack(*cursor, encoded.crc32c, payload.nbytes)), payload.data]
        taken = 0
        try:
            while views and not self._ended and not is_over():
                count = _sent(connection, views)
                _advance(views, count)
                taken += count
                if taken >= PROGRESS_BYTES:
                    progressed()
                    taken = 0
        except OSError:  # the consumer sees the end of the connection, and says what it wants instead
            pass
        with self._changed:
            self._writing = False
            if views or self._ended:
                self._close()
        return not views

    def end(self) -> bool:
        """Write no more, and close the connection; whether there ever was one."""
        with self._changed:
            self._ended = True
            self._close()
            self._changed.notify_all()
            return self._connection is not None

    def _close(self) -> None:
        """Close behind what was written. Under the lock; a thread that writes is woken, and closes itself."""
        self._ended = True
        if (connection := self._connection) is None or connection.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # the other side was faster
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # the plain one: TLS would wait for an answer
        if not self._writing:
            connection.close()


def _sent(connection: socket.socket, views: list[memoryview]) -> int:
    """Bytes that were taken, 0 after `LOOK_S` without any."""
    try:
        if isinstance(connection, ssl.SSLSocket):
            return connection.send(views[0][:PROGRESS_BYTES])  # TLS tells nothing of a part of what it was given
        return connection.sendmsg(views)
    except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError):
        return 0


def _advance(views: list[memoryview], count: int) -> None:
    """Drop so many bytes from the front."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if count:
        views[0] = views[0][count:]
