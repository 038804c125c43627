"""The pages of running servers, and a plain client of them."""

import base64
import gzip
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple

from dataserver.addresses import split_address
from dataserver.reporting.fleet_calls import NamedServers
from dataserver.security import NO_CREDENTIALS, Channels, Credentials
from dataserver.web.fleet_page import FleetPage
from dataserver.web.fleet_watch import FleetWatch
from dataserver.web.server import WebServer

TIMEOUT_S = 60


class Answer(NamedTuple):
    """Of the server of the pages."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """What it holds."""
        return json.loads(self.body)


def get(address: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """Ask; nothing is normalised on the way."""
    connection = HTTPConnection(*split_address(address), timeout=TIMEOUT_S)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        found = connection.getresponse()
        body = found.read()
        if found.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return Answer(found.status, {k.lower(): v for k, v in found.headers.items()}, body)
    finally:
        connection.close()


def password(token: str) -> str:
    """What a browser sends where a visitor types a token."""
    return "Basic " + base64.b64encode(f"me:{token}".encode()).decode()


@contextmanager
def fleet_page(*names: str, credentials: Credentials = NO_CREDENTIALS, interval_s: float = 0.2) -> Iterator[str]:
    """The address of a page that watches these servers."""
    watch = FleetWatch(NamedServers(names, Channels(credentials)), interval_s)
    server = WebServer("127.0.0.1", 0, {"/api/fleet": FleetPage(watch).document})
    watch.start()
    try:
        yield server.address
    finally:
        watch.close()
        server.close()


def fleet_when(address: str, ready: Any, **headers: str) -> Any:
    """The fleet as JSON, once it is as a test wants it."""
    end = time.monotonic() + TIMEOUT_S
    while not ready(found := get(address, "/api/fleet", **headers).json()):
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found
