"""Numbers of seven bits a byte, lowest first, as protobuf, Thrift and Snappy write them. It imports nothing of ours."""

from typing import Final

_MAX_BYTES: Final = 10
"""Bytes of an integer of 64 bits."""


class CutError(Exception):
    """What is read goes on behind the bytes that were given."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an unsigned number and where it ends.

    Args:
        data: holds it.
        at: where it begins.

    Raises:
        CutError: `data` ends within it.
        ValueError: it has more than 10 bytes.
    """
    value = 0
    for n in range(_MAX_BYTES):
        if at + n >= len(data):
            raise CutError
        byte = data[at + n]
        value |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            return value, at + n + 1
    raise ValueError(f"a number has more than {_MAX_BYTES} bytes")


def varint(number: int) -> bytes:
    """Write a number that is not negative."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
