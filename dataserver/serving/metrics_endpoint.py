"""The HTTP endpoint that gives a server's metrics to Prometheus.

It answers GET /metrics and nothing else. What is sent to it costs at most a few threads, for a few seconds. It asks for
the same certificates and tokens as the gRPC port.
"""

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any, Final

from disttrain.v1 import errors_pb2
from prometheus_client import generate_latest

from dataserver.addresses import joined
from dataserver.serving.access import Access, Right, require_right
from dataserver.serving.binding import when_free
from dataserver.serving.errors import DataServiceError
from dataserver.serving.metrics_families import metrics_registry
from dataserver.serving.metrics_message import TakeMetrics
from dataserver.serving.tls import ServerTls

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PATH: Final = "/metrics"
MAX_CONNECTIONS: Final = 16
"""At once; one more is closed."""
CONNECTION_S: Final = 5.0
"""After which a connection is closed, whatever it is doing."""
_POLL_S: Final = 0.5

_log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Serves the metrics over HTTP until it is closed."""

    def __init__(self, host: str, port: int, metrics: TakeMetrics, access: Access, tls: ServerTls | None) -> None:
        """Bind and serve.

        Args:
            host: where to listen.
            port: 0 takes a free one.
            metrics: the answer of GetMetrics.
            access: knows the callers.
            tls: encrypts; None where nothing does.

        Raises:
            ConfigError: the address cannot be bound.
        """
        registry = metrics_registry(metrics)

        def bind() -> _HttpServer:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return _HttpServer(family, (host, port), lambda: generate_latest(registry), access, tls)

        self._server = when_free(host, port, "--metrics-listen", bind, " for metrics")
        self.address = joined(host, self._server.server_address[1])
        """HOST:PORT with the port that was taken."""
        self.url = f"{'http' if tls is None else 'https'}://{self.address}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut connections off."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut(0.0)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    """Connections have a limit of their own; nobody waits for them."""

    def __init__(
        self,
        family: int,
        address: tuple[str, int],
        render: Callable[[], bytes],
        access: Access,
        tls: ServerTls | None,
    ) -> None:
        self.address_family = family
        self.render = render
        self.access = access
        self._tls = tls
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Connections and when they came."""
        super().__init__(address, _Handler)

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
        connection, client = super().get_request()
        if self._tls is not None:
            context = self._tls.context
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client

    def verify_request(self, request: Any, _client: Any) -> bool:
        """Whether there is room for one more connection."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[request] = monotonic()
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called a few times a second."""
        self.cut(CONNECTION_S)

    def cut(self, after_s: float) -> None:
        """End connections that are open for longer; their threads see it and close them."""
        with self._lock:
            for connection, since in self._open.items():
                if monotonic() - since >= after_s:
                    _shut(connection)

    def handle_error(self, _request: Any, _client: Any) -> None:
        """Log defects; say nothing of the network, or whoever cuts connections off could fill the log."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("metrics cannot be given")


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # its client was faster
        return


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = CONNECTION_S

    def setup(self) -> None:
        """Before the first request: the handshake, within the time that a connection has."""
        if isinstance(self.request, ssl.SSLSocket):
            self.request.settimeout(self.timeout)
            self.request.do_handshake()
        super().setup()

    def do_GET(self) -> None:
        """Answer with the metrics."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"metrics are at {PATH}")
            return
        if not self._is_permitted():
            return
        body = self.server.render()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _is_permitted(self) -> bool:
        """Whether the caller may see them; it is told if not."""
        access = self.server.access
        if access.is_open:
            return True
        try:
            token = access.token_name(self.headers.get_all("authorization") or [])
            require_right(access.identify(token, self._certificate_names()), Right.METRICS)
        except DataServiceError as error:
            access.audit.write(f"GET {PATH}", joined(*self.client_address[:2]), error.message)
            unknown = error.reason == errors_pb2.ERROR_REASON_UNAUTHENTICATED
            self.send_error(HTTPStatus.UNAUTHORIZED if unknown else HTTPStatus.FORBIDDEN, explain=error.message)
            return False
        return True

    def _certificate_names(self) -> list[str]:
        """DNS names and URIs of the caller's certificate."""
        shown = self.request.getpeercert() if isinstance(self.request, ssl.SSLSocket) else None
        entries: Any = (shown or {}).get("subjectAltName", ())
        return [str(name) for kind, name in entries if kind in ("DNS", "URI")]

    def version_string(self) -> str:
        """Name no versions to strangers."""
        return "disttrain"

    def log_message(self, *_: Any) -> None:
        """Say nothing, as above."""
