"""The HTTP server of the pages: files from a fixed table, and JSON from functions that answer at once.

It answers GET alone and changes nothing. It asks for a token where it is given tokens, and encrypts where it is given a
certificate. Without tokens, and always on loopback, it answers requests for its own names alone: otherwise a page of a
stranger could read it through a name of the stranger's (DNS rebinding). No page of another site can start work.
"""

import base64
import binascii
import gzip
import json
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

from dataserver.addresses import is_loopback, is_number, joined, split_address
from dataserver.dataset import printable
from dataserver.serving.access import Audit
from dataserver.serving.binding import when_free
from dataserver.serving.http_server import BoundedHttpServer, QuietHandler
from dataserver.web.assets import Body, load_assets
from dataserver.web.visitors import Door, RefusedError

MAX_CONNECTIONS: Final = 64
CONNECTION_S: Final = 30.0
MAX_QUERY_CHARS: Final = 8192
MAX_FIELDS: Final = 32
WORTH_ZIPPING_BYTES: Final = 4096
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer. No script or style but the files of this server runs, whatever a name or a caption holds."""

_log = logging.getLogger(__name__)

Query = Mapping[str, str]


class RequestError(ValueError):
    """A request that cannot be answered; the message says what is required."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


Route = Callable[[Query], Any]
"""Turns the fields of a request into what becomes JSON, or bytes that are JSON, or a `Body`; raises RequestError."""


class WebServer:
    """Serves the pages until it is closed."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        door: Door | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        names: Sequence[str] = (),
        option: str = "--listen",
    ) -> None:
        """Bind and serve.

        Args:
            host: where to listen.
            port: 0 takes a free one.
            routes: by the path of the request.
            door: every request has to pass it; None lets everybody in.
            tls: gives the context of the next connection; None where nothing is encrypted.
            names: of this server, beside its addresses, `localhost` and `host`.
            option: that names the address.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._server = when_free(
            host, port, option, lambda: _HttpServer(host, port, routes, door, tls, names), " for pages"
        )
        scheme = "http" if tls is None else "https"
        self.address = joined(host, self._server.server_address[1])
        """HOST:PORT with the port that was taken."""
        self.url = f"{scheme}://{self.address}/"
        self._server.start()

    def close(self) -> None:
        """Stop listening and cut connections off."""
        self._server.close()


class _HttpServer(BoundedHttpServer):
    max_connections = MAX_CONNECTIONS
    connection_s = CONNECTION_S
    name = "web"

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        door: Door | None,
        tls: Callable[[], ssl.SSLContext] | None,
        names: Sequence[str],
    ) -> None:
        self.routes, self.door, self.audit = routes, door, Audit()
        self.assets = load_assets()
        self.names = {name.lower() for name in names}
        self._host = host
        super().__init__(host, port, _Handler, tls)

    def is_named(self, host: str) -> bool:
        """Whether a value of the header Host is a name of this server."""
        try:
            name = split_address(_with_port(host))[0].strip("[]").lower()
        except ValueError:
            return False
        if name in self.names or is_loopback(name):
            return True
        if is_loopback(self._host):
            return False
        # A browser shows tokens to the name that they were typed for alone, and no name leads to an IP address.
        return self.door is not None or name == self._host.lower() or is_number(name)


class _Handler(QuietHandler):
    server: _HttpServer

    def do_GET(self) -> None:  # noqa: N802
        """Answer with a file or with JSON."""
        path, _, query = self.path.partition("?")
        if not self._is_for_this_server() or not self._is_let_in(path) or not self._is_from_this_site(path):
            return
        if (asset := self.server.assets.get(path)) is not None:
            self._send(HTTPStatus.OK, asset)
        elif (route := self.server.routes.get(path)) is not None:
            self._answer(route, query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, route: Route, query: str) -> None:
        try:
            found = route(fields_of(query))
            if not isinstance(found, Body):
                found = Body("application/json", found if isinstance(found, bytes) else json_bytes(found))
        except RequestError as error:
            self._refuse(error.status, str(error))
        except Exception:
            _log.exception("%s cannot be answered", printable(self.path, 200))
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "a defect of this server; its log has the details")
        else:
            self._send(HTTPStatus.OK, found)

    def _is_for_this_server(self) -> bool:
        named = self.headers.get_all("host") or []
        ours = len(named) == 1 and self.server.is_named(named[0])
        if not ours:
            why = "this server answers requests for localhost, its own addresses and the names that it was given alone"
            self._refuse(HTTPStatus.FORBIDDEN, why)
        return ours

    def _is_from_this_site(self, path: str) -> bool:
        """Whether no page of another site asks: it could not read the answer, but it could start work."""
        ours = not path.startswith("/api/") or self.headers.get("sec-fetch-site") not in ("cross-site", "same-site")
        if not ours:
            self._refuse(HTTPStatus.FORBIDDEN, "a page of another site asks; open the page of this server")
        return ours

    def _is_let_in(self, path: str) -> bool:
        if self.server.door is None:
            return True
        shown = [_as_bearer(value) for value in self.headers.get_all("authorization") or []]
        try:
            self.server.door.let_in(path, shown, self.certificate_names())
        except RefusedError as error:
            if shown or error.status is not HTTPStatus.UNAUTHORIZED:  # each browser's first request shows none
                self.server.audit.write(f"GET {path}", joined(*self.client_address[:2]), error.why)
            asks = {"WWW-Authenticate": 'Basic realm="DistTrain: the password is the token", charset="UTF-8"'}
            self._refuse(error.status, str(error), asks if error.status is HTTPStatus.UNAUTHORIZED else None)
            return False
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is not a request, or a request without an answer, in the form of all other answers."""
        self.close_connection = True
        status = HTTPStatus(code)
        self._refuse(status, explain or message or status.phrase)

    def _refuse(self, status: HTTPStatus, why: str, extra: Mapping[str, str] | None = None) -> None:
        self._send(status, Body("application/json", json_bytes({"error": why})), extra)

    def _send(self, status: HTTPStatus, found: Body, extra: Mapping[str, str] | None = None) -> None:
        body, headers = found.body, {**HEADERS, **(extra or {}), "Content-Type": found.content_type}
        asked = getattr(self, "headers", None)  # a request that cannot be read has none
        takes_gzip = asked is not None and "gzip" in (asked.get("accept-encoding") or "")
        if takes_gzip and len(body) >= WORTH_ZIPPING_BYTES and not found.content_type.startswith("image/jpeg"):
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def json_bytes(found: Any) -> bytes:
    """An answer as JSON; ASCII alone, so that no text of a stranger is anything else to a parser."""
    return json.dumps(found, allow_nan=False, separators=(",", ":")).encode("ascii")


def fields_of(query: str) -> dict[str, str]:
    """The fields of a query, each once.

    Raises:
        RequestError: it is too long, no UTF-8, or names a field twice.
    """
    if len(query) > MAX_QUERY_CHARS:
        raise RequestError(f"the query has {len(query)} characters; at most {MAX_QUERY_CHARS} are allowed")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
    except ValueError as error:
        raise RequestError(f"the query cannot be read: {error}") from None
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RequestError("the query names a field twice; each may stand once")
    return found


def _with_port(host: str) -> str:
    """The value of the header Host with a port, which it lacks for the scheme's own."""
    return host if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else f"{host}:80"


def _as_bearer(value: str) -> str:
    """What a browser shows (Basic, whose password is the token) in the form of all others."""
    scheme, _, rest = value.partition(" ")
    if scheme.lower() != "basic":
        return value
    try:
        text = base64.b64decode(rest, validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return ""
    return f"Bearer {text.partition(':')[2]}"
