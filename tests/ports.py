"""Ports for servers that must know theirs before they listen, such as those of a fleet."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

CANDIDATES = range(10_000, 64_000)
TRIES = 1000
_draw = random.SystemRandom()  # other processes of the tests draw others
_given = set[int]()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback device at which nobody listens, each given once.

    As far as there are others, none of them is one that the system gives to connections, and to servers that ask for
    any: until its server listens, another process may have got it.
    """
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    allowed = [port for port in CANDIDATES if not lowest <= port <= highest]
    found = list[int]()
    with ExitStack() as stack:  # holds all of them, so that the system gives each once
        for port in [*_draw.sample(allowed, min(TRIES, len(allowed))), *[0] * TRIES]:
            if len(found) == count:
                return found
            if port in _given:  # its server may be about to listen
                continue
            with suppress(OSError):
                got = stack.enter_context(socket.create_server(("127.0.0.1", port))).getsockname()[1]
                if got not in _given:
                    _given.add(got)
                    found.append(got)
    raise OSError(f"{len(found)} ports are free; {count} are required")


def free_addresses(count: int) -> list[str]:
    """Such ports as addresses of the loopback device."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]
