"""The HTTP endpoint that gives a server's metrics to Prometheus.

It answers GET /metrics and nothing else. What is sent to it costs at most a few threads, for a few seconds. It asks for
the same certificates and tokens as the gRPC port.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from disttrain.v1 import errors_pb2
from prometheus_client import generate_latest

from dataserver.addresses import joined
from dataserver.serving.access import Access, Right, require_right
from dataserver.serving.binding import when_free
from dataserver.serving.errors import DataServiceError
from dataserver.serving.http_server import BoundedHttpServer, QuietHandler
from dataserver.serving.metrics_families import metrics_registry
from dataserver.serving.metrics_message import TakeMetrics
from dataserver.serving.tls import ServerTls

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PATH: Final = "/metrics"


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
            return _HttpServer(host, port, lambda: generate_latest(registry), access, tls)

        self._server = when_free(host, port, "--metrics-listen", bind, " for metrics")
        self.address = joined(host, self._server.server_address[1])
        """HOST:PORT with the port that was taken."""
        self.url = f"{'http' if tls is None else 'https'}://{self.address}{PATH}"
        self._server.start()

    def close(self) -> None:
        """Stop listening and cut connections off."""
        self._server.close()


class _HttpServer(BoundedHttpServer):
    def __init__(
        self, host: str, port: int, render: Callable[[], bytes], access: Access, tls: ServerTls | None
    ) -> None:
        self.render = render
        self.access = access
        super().__init__(host, port, _Handler, None if tls is None else lambda: tls.context)


class _Handler(QuietHandler):
    server: _HttpServer

    def do_GET(self) -> None:  # noqa: N802
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
        """Whether the caller may see the metrics; a caller that may not is told so."""
        access = self.server.access
        if access.is_open:
            return True
        try:
            token = access.token_name(self.headers.get_all("authorization") or [])
            require_right(access.identify(token, self.certificate_names()), Right.METRICS)
        except DataServiceError as error:
            access.audit.write(f"GET {PATH}", joined(*self.client_address[:2]), error.message)
            unknown = error.reason == errors_pb2.ERROR_REASON_UNAUTHENTICATED
            self.send_error(HTTPStatus.UNAUTHORIZED if unknown else HTTPStatus.FORBIDDEN, explain=error.message)
            return False
        return True
