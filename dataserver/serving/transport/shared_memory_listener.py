"""Where clients on this machine ask for shared memory.

A client of the server's own user connects to a Unix socket in Linux's abstract namespace, which those share who share
a loopback device, and says a token. The stream that it then asks for with this token shares blocks with it.
"""

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import Final

from dataserver.serving.stream_memory import Account, BufferPool
from dataserver.serving.transport.shared_memory import SEALS, SharedMemoryTransport

MAX_BLOCKS: Final = 512
"""Blocks of all clients: each takes a descriptor, and most systems permit a process 1,024 of them."""
MAX_PENDING: Final = 256
"""Connections whose stream was not asked for yet; the oldest is closed for one more."""

_HELLO: Final = struct.Struct("<16sQ")
"""A client sends this first, and once: its token, and the most bytes that it wants."""
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group at the other end, as SO_PEERCRED has them."""


class SharedMemoryListener:
    """Takes in clients on this machine. Thread-safe."""

    def __init__(self, wanted: bool) -> None:
        """Listen, if it is wanted and the system has what it takes: Linux does."""
        self.name = ""
        """Name of the socket in the abstract namespace; empty where there is none."""
        self._blocks_left = threading.Semaphore(MAX_BLOCKS)
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, tuple[bytes, int] | None] = {}
        """Connections that belong to no stream yet, with what they said, oldest first."""
        self._listener: socket.socket | None = None
        if wanted and hasattr(os, "memfd_create") and SEALS:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self.name = f"disttrain-{secrets.token_hex(16)}"
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(MAX_PENDING)

    def transport(self, token: bytes, account: Account, buffers: BufferPool) -> SharedMemoryTransport | None:
        """The transport to the client that said this token on a connection before it asked for its stream.

        Args:
            token: from the request for the stream.
            account: from which the blocks are taken.
            buffers: the pool that keeps as much less for reuse.
        """
        if not token:
            return None
        with self._lock:
            self._accept()
            for connection in tuple(self._waiting):
                said = self._hello(connection)
                if said is not None and secrets.compare_digest(said[0], token):
                    del self._waiting[connection]
                    return SharedMemoryTransport(connection, said[1], account, buffers, self._blocks_left)
        return None

    def close(self) -> None:
        """Take no further clients, and close connections that wait for theirs."""
        with self._lock:
            for connection in (*self._waiting, *filter(None, [self._listener])):
                connection.close()
            self._waiting.clear()
            self._listener = None

    def _accept(self) -> None:
        """Take in all who have come, as far as there are descriptors."""
        with suppress(OSError):
            while self._listener is not None:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
                    connection.close()
                    continue
                self._waiting[connection] = None
                if len(self._waiting) > MAX_PENDING:
                    self._forget(next(iter(self._waiting)))

    def _hello(self, connection: socket.socket) -> tuple[bytes, int] | None:
        """What a connection has said first, if anything; one that said something else, or is gone, is closed."""
        try:
            message = connection.recv(_HELLO.size + 1)
        except BlockingIOError:
            return self._waiting[connection]
        except OSError:
            message = b""
        if len(message) != _HELLO.size:
            self._forget(connection)
            return None
        token, limit = _HELLO.unpack(message)
        self._waiting[connection] = (token, limit)
        return token, limit

    def _forget(self, connection: socket.socket) -> None:
        del self._waiting[connection]
        connection.close()
