"""Ports for servers that must know theirs before they listen, such as those of a fleet."""

import random
import socket
from contextlib import suppress
from pathlib import Path

CANDIDATES = range(10_000, 64_000)
_draw = random.SystemRandom()  # other processes of the tests draw others
_given = set[int]()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback device at which nobody listens, each given once.

    None of them is one that the system gives to connections, and to servers that ask for any: until its server
    listens, another process may have got it.
    """
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    allowed = [port for port in CANDIDATES if not lowest <= port <= highest]
    found = list[int]()
    while len(found) < count:
        port = _draw.choice(allowed)
        with suppress(OSError):
            if port not in _given:
                socket.create_server(("127.0.0.1", port)).close()
                _given.add(port)
                found.append(port)
    return found


def free_addresses(count: int) -> list[str]:
    """Such ports as addresses of the loopback device."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]
