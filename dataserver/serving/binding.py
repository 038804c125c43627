"""Binding an address that somebody else may have for a moment."""

import errno
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import grpc

from dataserver.addresses import joined
from dataserver.serving.config import ConfigError

RETRY_S: Final = 5.0
"""Seconds for which a port that is taken is tried again: by the server before this one, or by a connection."""
_LOOK_S: Final = 0.2
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")

Bound = TypeVar("Bound")
_log = logging.getLogger(__name__)


def when_free(host: str, port: int, option: str, bind: Callable[[], Bound], what: str = "") -> Bound:
    """Bind an address, for a few seconds again while its port is taken.

    Args:
        host: where to listen.
        port: of it.
        option: that names the address.
        bind: does it, or raises OSError.
        what: is listened for; nothing to be said by default.

    Raises:
        ConfigError: it cannot be bound.
    """
    address, until = joined(host, port), None
    while True:
        try:
            return bind()
        except OSError as error:
            is_taken, now = error.errno == errno.EADDRINUSE, time.monotonic()
            if not is_taken or (until is not None and now >= until):
                more = ephemeral(port) if is_taken else ""
                raise ConfigError(
                    f"cannot listen{what} on {address}: {error.strerror or error}{more}; choose another address with "
                    f"{option}"
                ) from None
            if until is None:
                until = now + RETRY_S
                _log.warning("%s is taken%s; trying again for %g s", address, ephemeral(port), RETRY_S)
        time.sleep(_LOOK_S)


def bind_grpc(
    server: grpc.Server,
    where: tuple[str, int],
    option: str,
    credentials: grpc.ServerCredentials | None = None,
    what: str = "",
) -> int:
    """Have a gRPC server listen, as `when_free` does; the port that was taken.

    Args:
        server: that has not begun.
        where: host and port; port 0 takes a free one.
        option: that names the address.
        credentials: what it shows; None leaves it plain.
        what: as in `when_free`.

    Raises:
        ConfigError: it cannot be bound.
    """
    address = joined(*where)

    def bind() -> int:
        probe(*where)
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(str(error)) from None

    return when_free(*where, option, bind, what)


def probe(host: str, port: int) -> None:
    """Raise OSError, in the words of the system, where an address cannot be bound: gRPC keeps them to itself."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(address)


def ephemeral(port: int) -> str:
    """A remark on a port that the system also gives to connections; empty for others."""
    try:
        first, last = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no such system
        return ""
    if not first <= port <= last:
        return ""
    return (
        f" (the system gives ports {first} to {last} to outgoing connections, too: listen below them, or reserve this "
        f"one with sysctl net.ipv4.ip_local_reserved_ports={port})"
    )
