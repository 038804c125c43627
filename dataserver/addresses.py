"""Addresses, and lists of them, in which a range of ports stands for one server each. Both sides use this."""

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

MAX_ADDRESSES: Final = 1024
"""Addresses that one list may hold."""
_RANGE: Final = re.compile(r"(?P<host>.*):(?P<first>[0-9]{1,5})-(?P<last>[0-9]{1,5})")


def expanded(entries: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses that a list stands for; `HOST:FIRST-LAST` stands for one at each port from FIRST to LAST.

    Args:
        entries: a sequence of addresses, or a text with commas between them. Whether each is an address is for the
            caller to check.

    Raises:
        ValueError: the ports of a range are wrong, or there are more than `MAX_ADDRESSES` addresses.
    """
    found: list[str] = []
    for entry in entries.split(",") if isinstance(entries, str) else entries:
        text = entry.strip()
        match = _RANGE.fullmatch(text)
        ports = range(1) if match is None else _ports(text, int(match["first"]), int(match["last"]))
        if len(found) + len(ports) > MAX_ADDRESSES:
            raise ValueError(f"the list of addresses has more than {MAX_ADDRESSES}, which is reached at {text!r}")
        found += [text] if match is None else [f"{match['host']}:{port}" for port in ports]
    return tuple(found)


def joined(host: str, port: int) -> str:
    """The address of a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str, key: str = "listen") -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`; ValueError, which names the key, for anything else."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    malformed = not host or "/" in host or (":" in host and not is_number(host))
    if malformed or not separator or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"{key} is {address!r}; HOST:PORT with a port from 0 to 65535 is required")
    return host, int(port)


def is_number(host: str) -> bool:
    """Whether a host is an IP address, not a name."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    return host == "localhost" or (is_number(host) and ipaddress.ip_address(host).is_loopback)


def _ports(text: str, first: int, last: int) -> range:
    if not 1 <= first <= last <= 65535:
        raise ValueError(
            f"{text!r} is no range of addresses; HOST:FIRST-LAST is required, with ports from 1 to 65535 and FIRST no "
            "larger than LAST"
        )
    return range(first, last + 1)
