"""The data port, where clients connect for payloads that are sent directly.

One thread takes connections in, and hands each to the stream whose token it says first. Only the client of that stream
knows the token, and it is good once. A connection that says nothing, or something else, takes one of a few descriptors,
and not for long.
"""

import errno
import logging
import secrets
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from dataserver.serving.descriptors import max_connections
from dataserver.serving.transport.direct import DirectTransport

MAGIC: Final = b"DTD1"
"""Begins what both sides say first, and names the version of what follows."""
TOKEN_BYTES: Final = 16
HANDSHAKE_S: Final = 5.0
"""Most seconds from a connection to its token."""
MAX_PENDING: Final = 256
"""Connections that have not said a token yet, at most; the oldest is closed for one more. Fewer where descriptors are
few."""
PENDING_SHARE: Final = 8
"""One in so many of the descriptors that gRPC's connections may take."""
_HELLO_BYTES: Final = len(MAGIC) + TOKEN_BYTES
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of `accept` that closing a connection helps against."""
RETRY_S: Final = 0.05
"""Seconds until the thread goes on after an error that it can do nothing about."""

_log = logging.getLogger(__name__)


class _Pending:
    """A connection without a token."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.until = monotonic() + HANDSHAKE_S
        self.said = b""
        self.secured = not isinstance(connection, ssl.SSLSocket)
        """Whether bytes can be read: TLS shakes hands first."""


class DirectListener:
    """Takes in the data connections of all streams. Thread-safe."""

    def __init__(self) -> None:
        """Offer nothing: there is no port yet."""
        self.port: int | None = None
        """Port that is listened on; None where there is none."""
        self._lock = threading.Lock()
        """Guards `_offers`."""
        self._offers: dict[bytes, DirectTransport] = {}
        """Those that were not taken up yet, by token."""
        self._listener: socket.socket | None = None
        self._tls: Callable[[], ssl.SSLContext] | None = None
        self._wake: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._pending: dict[socket.socket, _Pending] = {}
        """Oldest first; the thread's alone, as is what follows."""
        self._selector = selectors.DefaultSelector()
        self._max_pending = min(MAX_PENDING, max(1, max_connections() // PENDING_SHARE))

    def listen(self, host: str, port: int, tls: Callable[[], ssl.SSLContext] | None = None) -> int:
        """Listen from now on; the port that was taken.

        Args:
            host: a name or a number; 0.0.0.0 and :: stand for all addresses of both kinds.
            port: 0 takes a free one.
            tls: gives what a connection is secured with; None leaves all plain.

        Raises:
            OSError: the address cannot be bound.
        """
        self._tls = tls
        self._listener = _bound(host, port)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._wake, waked = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(waked, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, args=(self._listener, waked), name="direct", daemon=True)
        self._thread.start()
        return self.port

    def offer(self) -> DirectTransport | None:
        """A transport for one stream, whose client is to be told its token; None without a port."""
        if self.port is None:
            return None
        offered = DirectTransport(secrets.token_bytes(TOKEN_BYTES), self.port)
        with self._lock:
            self._offers[offered.token] = offered
        return offered

    def withdraw(self, offered: DirectTransport) -> bool:
        """End a stream's transport, whether it has a connection or not; whether it ever had one."""
        with self._lock:
            self._offers.pop(offered.token, None)
        return offered.end()

    def close(self) -> None:
        """Take no further connections, and end the thread that accepts them."""
        if self._wake is not None and self._thread is not None:
            self._wake.close()
            self._thread.join()

    def _run(self, listener: socket.socket, waked: socket.socket) -> None:
        with listener, waked, self._selector:
            try:
                while True:
                    try:
                        if self._is_over(listener, waked):
                            break
                    except Exception:  # of one connection: all streams need this thread
                        _log.exception("a data connection is lost")
                        threading.Event().wait(RETRY_S)
            finally:
                self.port = None  # nothing is offered that nobody takes in
            for pending in tuple(self._pending.values()):
                self._forget(pending).close()

    def _is_over(self, listener: socket.socket, waked: socket.socket) -> bool:
        """Wait for connections and serve those that have something; whether the thread is to end."""
        first = next(iter(self._pending.values()), None)
        timeout = None if first is None else max(0.0, first.until - monotonic())
        ready = [key.fileobj for key, _ in self._selector.select(timeout)]
        if waked in ready:
            return True
        for connection in ready:
            if connection is listener:
                self._accept(listener)
            elif (pending := self._pending.get(connection)) is not None:  # type: ignore[call-overload]
                self._listen_to(pending)
        self._drop_late()
        return False

    def _accept(self, listener: socket.socket) -> None:
        """Take in one who has come, as far as there are descriptors."""
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # the peer is gone already, or there is no descriptor left
            _log.debug("a data connection cannot be taken: %s", error)
            if error.errno in _SCARCE and self._pending:
                self._forget(next(iter(self._pending.values()))).close()
            elif error.errno in _SCARCE:  # others have them all
                threading.Event().wait(RETRY_S)
            return
        connection.setblocking(False)
        if self._tls is not None:
            try:
                connection = self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            except OSError as error:  # the peer is gone already, or has not waited for TLS
                _log.debug("a data connection cannot be secured: %s", error)
                connection.close()
                return
            except Exception:
                connection.close()
                raise
        while len(self._pending) >= self._max_pending:
            self._forget(next(iter(self._pending.values()))).close()
        self._pending[connection] = _Pending(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen_to(self, pending: _Pending) -> None:
        """Read what a connection says, and hand it over where that is a token."""
        try:
            if not pending.secured:
                assert isinstance(pending.connection, ssl.SSLSocket)
                pending.connection.do_handshake()
                pending.secured = True
            said = pending.connection.recv(_HELLO_BYTES - len(pending.said))
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(pending.connection, selectors.EVENT_READ)
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(pending.connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return
        except OSError:
            said = b""
        pending.said += said
        if said and MAGIC.startswith(pending.said[: len(MAGIC)]) and len(pending.said) < _HELLO_BYTES:
            return
        self._forget(pending)
        with self._lock:
            token = pending.said.removeprefix(MAGIC) if said and pending.said.startswith(MAGIC) else b""
            offered = self._offers.pop(token, None)
        if offered is None:
            pending.connection.close()
            return
        try:
            pending.connection.send(MAGIC)
            offered.attach(pending.connection)
        except OSError:  # its peer is gone; the stream goes on with chunks
            pending.connection.close()

    def _drop_late(self) -> None:
        now = monotonic()
        while (first := next(iter(self._pending.values()), None)) is not None and first.until <= now:
            self._forget(first).close()

    def _forget(self, pending: _Pending) -> socket.socket:
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)
        return pending.connection


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket; on all addresses of both kinds where the host says so, as gRPC does."""
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():  # noqa: S104
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            # else IPv6 is off, and the host alone is left
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(address[0]), port), family=family)
