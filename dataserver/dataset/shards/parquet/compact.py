"""Thrift's compact protocol, as far as Parquet's headers and footers use it."""

from typing import Any, Final

from dataserver.varints import CutError, read_varint

MAX_DEPTH: Final = 12
"""Structures and lists within each other."""
_LONG: Final = 15
"""A list says its count behind its header where that has this one."""


def read_struct(data: bytes, at: int, depth: int = MAX_DEPTH) -> tuple[dict[int, Any], int]:
    """Return the fields of a structure, by number, and where it ends.

    Values are integers, booleans, structures and lists of them; None stands for any other.

    Raises:
        CutError: `data` ends within it.
        ValueError: it is no such structure, or nested more deeply than `depth`.
    """
    if depth == 0:
        raise ValueError("its header is nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while True:
        if at >= len(data):
            raise CutError
        kind, step, at = data[at] & 0x0F, data[at] >> 4, at + 1
        if kind == 0:
            return fields, at
        if step:
            number += step
        else:
            raw, at = read_varint(data, at)
            number = _zigzag(raw)
        fields[number], at = read_value(data, at, kind, depth)


def read_value(data: bytes, at: int, kind: int, depth: int = MAX_DEPTH) -> tuple[Any, int]:
    """Return a value of a kind as `read_struct` does, and where it ends."""
    if kind in (1, 2):
        return kind == 1, at
    if kind in (4, 5, 6):
        raw, at = read_varint(data, at)
        return _zigzag(raw), at
    if kind == 12:
        return read_struct(data, at, depth - 1)
    if kind in (9, 10):
        return _list(data, at, depth)
    length = {3: 1, 7: 8}.get(kind)
    if kind == 8:
        length, at = read_varint(data, at)
    if length is None:
        raise ValueError(f"its header has a field of type {kind}")
    if at + length > len(data):
        raise CutError
    return None, at + length


def read_list_header(data: bytes, at: int) -> tuple[int, int, int]:
    """Return how many values a list has, their kind, and where the first one begins."""
    if at >= len(data):
        raise CutError
    count, kind, at = data[at] >> 4, data[at] & 0x0F, at + 1
    if count == _LONG:
        count, at = read_varint(data, at)
    if count > len(data):
        raise CutError
    return count, kind, at


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    if depth == 0:
        raise ValueError("its header is nested too deeply")
    count, kind, at = read_list_header(data, at)
    if kind in (1, 2):  # in lists a boolean has a byte of its own
        return [None] * count, at + count
    values = []
    for _ in range(count):
        value, at = read_value(data, at, kind, depth - 1)
        values.append(value)
    return values, at


def _zigzag(raw: int) -> int:
    return (raw >> 1) ^ -(raw & 1)
