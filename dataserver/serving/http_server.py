"""A small HTTP server whose costs are bounded: so many connections at once, each for so many seconds at most."""

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from time import monotonic, sleep
from typing import Any, Final

MAX_HEAD_BYTES: Final = 128 << 10
"""Largest request line with all headers, twice what the line alone may have."""
PAUSE_S: Final = 0.1
"""After a connection that could not be taken, as where no descriptors are left; or the loop would take a whole core."""
POLL_S: Final = 0.5
"""How often connections that are open for too long are looked for."""

_log = logging.getLogger(__name__)


class BoundedHttpServer(ThreadingHTTPServer):
    """One thread a connection, and no more connections than `max_connections`: one more is closed at once."""

    daemon_threads = True
    block_on_close = False
    """Connections have a limit of their own; nobody waits for them."""
    max_connections = 16
    connection_s = 5.0
    """After which a connection is closed, whatever it is doing."""
    name = "metrics"
    """What is served, for the log and the thread."""

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[BaseHTTPRequestHandler],
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        """Bind; `start` serves.

        Args:
            host: where to listen.
            port: 0 takes a free one.
            handler: of requests.
            tls: gives the context of the next connection; None where nothing is encrypted.

        Raises:
            OSError: the address cannot be bound.
        """
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._tls = tls
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Connections and when they came."""
        super().__init__((host, port), handler)

    def start(self) -> None:
        """Serve in a thread of its own until `close`."""
        threading.Thread(target=self.serve_forever, args=(POLL_S,), name=self.name, daemon=True).start()

    def close(self) -> None:
        """Stop listening and cut connections off."""
        self.shutdown()
        self.server_close()
        self.cut(0.0)

    def server_bind(self) -> None:
        """Bind; the inherited one also looks up the host's name, which can take long."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a server that is back would have to wait
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection; its handshake, if any, is for the thread that answers it."""
        try:
            connection, client = super().get_request()
        except OSError:
            sleep(PAUSE_S)
            raise
        if self._tls is not None:
            connection = self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client

    def verify_request(self, request: Any, _client: Any) -> bool:
        """Whether there is room for one more connection."""
        with self._lock:
            if len(self._open) >= self.max_connections:
                return False
            self._open[request] = monotonic()
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and count it no more."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called a few times a second."""
        self.cut(self.connection_s)

    def cut(self, after_s: float) -> None:
        """End connections that are open for longer; their threads see it and close them."""
        with self._lock:
            for connection, since in self._open.items():
                if monotonic() - since >= after_s:
                    _shut(connection)

    def handle_error(self, _request: Any, _client: Any) -> None:
        """Log defects; say nothing of the network, or whoever cuts connections off could fill the log."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("%s cannot be given", self.name)


class TooLongError(OSError):
    """A request is longer than `MAX_HEAD_BYTES`; its connection is closed, like one that was cut."""


class _Head:
    """What is read of a request; fulfils what the inherited handler asks of a file."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = MAX_HEAD_BYTES

    def readline(self, limit: int) -> bytes:
        """The next line. Raises TooLongError where all lines together are too long."""
        line = self._file.readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise TooLongError(f"a request of more than {MAX_HEAD_BYTES} bytes")
        return line

    def close(self) -> None:
        self._file.close()


class QuietHandler(BaseHTTPRequestHandler):
    """Answers requests of a `BoundedHttpServer`; logs none of them and names no versions."""

    server: BoundedHttpServer

    def setup(self) -> None:
        """Before the first request: the handshake, within the time that a connection has."""
        self.request.settimeout(self.server.connection_s)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()
        self.rfile: Any = _Head(self.rfile)

    def certificate_names(self) -> list[str]:
        """DNS names and URIs of the caller's certificate."""
        shown = self.request.getpeercert() if isinstance(self.request, ssl.SSLSocket) else None
        entries: Any = (shown or {}).get("subjectAltName", ())
        return [str(name) for kind, name in entries if kind in ("DNS", "URI")]

    def version_string(self) -> str:
        """Name no versions to strangers."""
        return "disttrain"

    def log_message(self, *_: Any) -> None:
        """Say nothing, or strangers could fill the log."""


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # its client was faster
        return
