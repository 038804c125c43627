"""The host that a gRPC connection of this process has reached, which gRPC does not tell.

A name may stand for several servers, and a data connection must go to the one that the stream comes from.
"""

import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from dataserver.addresses import is_number, split_address

_DESCRIPTORS: Final = Path("/proc/self/fd")


def reached_host(address: str, own_port: int) -> str | None:
    """The IP address of a server that this process is connected to; None where several are possible.

    Args:
        address: of the server, HOST:PORT.
        own_port: TCP port of this end of the connection, as the server sees it; 0 where it does not know.

    Raises:
        OSError: the name cannot be resolved.
    """
    host, port = split_address(address)
    if is_number(host):
        return host
    hosts = {there for own, there, at in _connections() if own == own_port and at == port}
    if len(hosts) != 1:  # no such system, or something between the two changes ports
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        hosts = {str(entry[4][0]) for entry in found}
    return hosts.pop() if len(hosts) == 1 else None


def _connections() -> list[tuple[int, str, int]]:
    """Own port, host and port of the other side, of all TCP connections of this process."""
    found: list[tuple[int, str, int]] = []
    with suppress(OSError):  # no /proc
        for entry in _DESCRIPTORS.iterdir():
            with suppress(OSError, ValueError):  # closed meanwhile, no TCP socket, or not connected
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    own, other = connection.getsockname(), connection.getpeername()
                    found.append((int(own[1]), _plain(str(other[0])), int(other[1])))
    return found


def _plain(host: str) -> str:
    """Without the form that IPv6 sockets give to IPv4 addresses."""
    number = ipaddress.ip_address(host.partition("%")[0])
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)
