"""Lists of addresses, in which a range of ports stands for one server each. Servers and trainers use this alike."""

import re
from collections.abc import Sequence
from typing import Final

MAX_ADDRESSES: Final = 1024
"""In one list."""
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


def _ports(text: str, first: int, last: int) -> range:
    if not 1 <= first <= last <= 65535:
        raise ValueError(
            f"{text!r} is no range of addresses; HOST:FIRST-LAST is required, with ports from 1 to 65535 and FIRST no "
            "larger than LAST"
        )
    return range(first, last + 1)
