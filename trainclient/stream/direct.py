"""A data connection: payloads of one stream are read from TCP into the memory that becomes the tensors.

The server's first message offers it (`DirectOffer`, which describes every byte). A thread of its own opens it, since
nothing waits for it: until the server has taken the token, payloads come as chunks. Whatever goes wrong here ends the
data connection, not the stream: its owner asks the server for chunks, and no byte is lost.
"""

import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from crc32c import crc32c as crc32c_of
from disttrain.v1.data_service_pb2 import DirectOffer

from dataserver.addresses import joined, split_address
from trainclient.stream.buffers import Bytes
from trainclient.stream.microbatch import Cursor
from trainclient.stream.reached_host import reached_host

MAGIC: Final = b"DTD1"
CONNECT_S: Final = 5.0
"""Most seconds until there is a connection, and again until the server has taken the token."""
SILENCE_S: Final = 10.0
"""While a frame is due, `LEAST_BYTES` of it must come within that."""
LEAST_BYTES: Final = 64 << 10
LOOK_S: Final = 0.2
"""A read that has waited for so long looks whether it still should."""
PIECE_BYTES: Final = 1 << 20
"""Read and summed up at once, while it is in the processor's caches."""

_FRAME: Final = struct.Struct("<QIIQ")
"""Step, microbatch, CRC-32C and bytes of the payload that follows."""


class DirectError(Exception):
    """Why a data connection is of no use. Chunks are: it never ends a stream."""


class DirectConnection:
    """The data connection of one stream. One thread uses it."""

    def __init__(self, address: str, offer: DirectOffer, tls: ssl.SSLContext | None) -> None:
        """Begin to connect.

        Args:
            address: of the server, as HOST:PORT.
            offer: that it made.
            tls: encrypts the connection; None where gRPC's is plain as well.
        """
        self.token = offer.token
        self._connection: socket.socket | None = None
        self._error: DirectError | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Held where a connection is opened or closed."""
        self._dialling = threading.Thread(target=self._dial, args=(address, offer, tls), name="direct", daemon=True)
        try:
            self._dialling.start()
        except RuntimeError as error:  # no thread is left
            self._error = DirectError(f"it cannot be opened: {error}")

    @property
    def error(self) -> DirectError | None:
        """Why there is no connection; None while that is not known, or there is one."""
        return self._error

    def read(self, cursor: Cursor, crc32c: int, buffer: Bytes, is_over: Callable[[], bool]) -> None:
        """Read the frame of a microbatch.

        Args:
            cursor: of the microbatch.
            crc32c: of its payload, as its header says.
            buffer: uint8 [total_bytes], filled with the payload.
            is_over: whether the stream has ended, so that nothing more comes.

        Raises:
            DirectError: it did not come, or is another one.
        """
        while self._dialling.is_alive():  # not for long: the server has taken the token
            self._dialling.join(LOOK_S)
            if is_over():
                raise DirectError("the stream has ended")
        if self._error is not None:
            raise self._error
        assert self._connection is not None
        watch = _Watch(_FRAME.size + buffer.nbytes, is_over)
        head = bytearray(_FRAME.size)
        _fill(self._connection, memoryview(head), watch)
        found = _FRAME.unpack(head)
        wanted = (cursor.step, cursor.microbatch, crc32c, buffer.nbytes)
        if found != wanted:
            raise DirectError(
                f"a frame of (step, microbatch, CRC-32C, bytes) {found} came, and the header says {wanted}"
            )
        checksum = 0
        for start in range(0, len(buffer), PIECE_BYTES):
            piece = buffer[start : start + PIECE_BYTES]
            _fill(self._connection, piece.data, watch)
            checksum = crc32c_of(piece.data, checksum)
        if checksum != crc32c:
            raise DirectError(f"a payload came with CRC-32C {checksum:08x}, and its header says {crc32c:08x}")

    def close(self) -> None:
        """Close the connection, and read no more from it."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()

    def _dial(self, address: str, offer: DirectOffer, tls: ssl.SSLContext | None) -> None:
        try:
            connection = _connected(address, offer, tls)
        except DirectError as error:
            self._error = error
            return
        except Exception as error:  # whatever it is, chunks need no data connection
            self._error = DirectError(f"it cannot be opened: {type(error).__name__}: {error}")
            return
        with self._lock:
            self._connection = connection
            if self._closed:
                connection.close()


class _Watch:
    """How much came, and when: a connection on which next to nothing comes is worse than chunks."""

    def __init__(self, due: int, is_over: Callable[[], bool]) -> None:
        self.due = due
        self._is_over = is_over
        self._came = 0
        self._until = time.monotonic() + SILENCE_S

    def waited(self, count: int) -> None:
        """So many bytes came, fewer than were waited for."""
        self.due -= count
        self._came += count
        if count == 0 and self._is_over():
            raise DirectError("the stream has ended")
        if self._came >= LEAST_BYTES:
            self._came, self._until = 0, time.monotonic() + SILENCE_S
        elif time.monotonic() > self._until:
            raise DirectError(f"{self._came} bytes came in {SILENCE_S:g} s, while {self.due} more were due")


def _fill(connection: socket.socket, view: memoryview, watch: _Watch) -> None:
    """Read until a view is full."""
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    while len(view):
        try:
            count = connection.recv_into(view, len(view), flags)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            watch.waited(0)
            continue
        except OSError as error:
            raise DirectError(f"it was cut while {watch.due} bytes were due: {error.strerror or error}") from None
        if count == 0:
            raise DirectError(f"the other side closed it while {watch.due} bytes were due")
        watch.waited(count)
        view = view[count:]


def _connected(address: str, offer: DirectOffer, tls: ssl.SSLContext | None) -> socket.socket:
    """A connection whose token the server has taken.

    Raises:
        DirectError: there can be none.
    """
    try:
        host = reached_host(address, offer.client_port)
    except OSError as error:
        raise DirectError(f"the host of {address} cannot be found: {error.strerror or error}") from None
    if host is None:
        raise DirectError(f"{address} stands for several hosts, and it cannot be told which one gRPC has reached")
    where = joined(host, offer.port)
    try:
        connection = socket.create_connection((host, offer.port), CONNECT_S)
        if tls is not None:  # under the name by which gRPC knows the server
            connection = tls.wrap_socket(connection, server_hostname=split_address(address)[0])
    except (OSError, OverflowError) as error:
        raise DirectError(f"{where} cannot be reached: {_said(error)}") from None
    try:
        _introduce(connection, offer.token, where)
    except OSError as error:
        connection.close()
        raise DirectError(f"{where} does not take the token: {_said(error)}") from None
    except DirectError:
        connection.close()
        raise
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(LOOK_S)
        return connection
    # Blocking, with a limit in the kernel: a whole piece is one call, which needs the interpreter once.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(LOOK_S * 1e6)))
    return connection


def _introduce(connection: socket.socket, token: bytes, where: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(MAGIC + token)
    answer, until = b"", time.monotonic() + CONNECT_S
    while len(answer) < len(MAGIC):
        connection.settimeout(max(0.001, until - time.monotonic()))
        try:
            piece = connection.recv(len(MAGIC) - len(answer))
        except ConnectionResetError:  # as by a server whose token is another one
            piece = b""
        answer += piece
        if not piece or not MAGIC.startswith(answer):
            found = f"answers {answer!r}" if answer else "closes the connection without an answer"
            raise DirectError(f"{where} {found}; another program or another server listens there, or a proxy")


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    return getattr(error, "strerror", None) or str(error)
