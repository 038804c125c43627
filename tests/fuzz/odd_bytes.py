"""Good files whose bytes are changed at a few places, drawn by Hypothesis.

Places are any integers: they are taken modulo the length, so that negative ones count from the end.
"""

from collections.abc import Sequence
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from odd_shards.tars import BLOCK, mended

MAX_BYTES: Final = 1 << 20
"""Of a changed input: repetitions of repetitions would fill memory."""

PLACES: Final = st.integers(-(1 << 16), 1 << 16)
TIMES: Final = st.sampled_from((2, 50))
NUMBERS: Final = st.builds(
    lambda number, size, order: (number % (1 << 8 * size)).to_bytes(size, order),
    st.integers(-(1 << 63), 1 << 63),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from(("big", "little")),
)

Change = tuple[Any, ...]
"""A function, and what it is given after what it changes."""


class Known(bytes):
    """A good file, which no report need spell out."""

    def __repr__(self) -> str:
        return f"<{len(self)} known bytes>"


def changes(*kinds: tuple[Any, ...]) -> SearchStrategy[list[Change]]:
    """A few changes; of each kind the function, and strategies of what it is given."""
    return st.lists(st.one_of([st.tuples(st.just(kind), *given) for kind, *given in kinds]), min_size=1, max_size=3)


def harmed(files: Sequence[bytes], others: Sequence[bytes] = ()) -> SearchStrategy[bytes]:
    """Files that are harmed, whatever their bytes mean; spliced with others, or with each other."""
    values = st.binary(min_size=1, max_size=8) | NUMBERS
    harm = changes(
        (put, PLACES, values),
        (flip, PLACES, st.integers(0, 7)),
        (insert, PLACES, values),
        (cut, PLACES, PLACES),
        (repeat, PLACES, PLACES, TIMES),
        (splice, PLACES, _known(others or files), PLACES),
    )
    return st.builds(_changed, _known(files), harm)


def odd_tars(file: bytes) -> SearchStrategy[bytes]:
    """A tar with other values in its headers, whose checksums are right."""
    octal = st.integers(0, 1 << 36).map(lambda number: b"%012o" % number)
    binary = st.integers(-(1 << 86), 1 << 86).map(lambda number: b"\x80" + number.to_bytes(11, "big", signed=True))
    values = octal | binary | st.binary(max_size=12) | st.sampled_from((b"x", b"g", b"L", b"S", b"5"))
    change = changes((set_field, PLACES, st.sampled_from(sorted(TAR_FIELDS)), values))
    return st.builds(_changed, _known([file]), change)


def _known(files: Sequence[bytes]) -> SearchStrategy[Known]:
    return st.sampled_from([Known(file) for file in files])


def _changed(data: bytes, changes: list[Change]) -> bytes:
    for change, *given in changes:
        data = change(data, *given)[:MAX_BYTES]
    return data


def _at(data: bytes, place: int) -> int:
    return place % (len(data) + 1)


def put(data: bytes, place: int, value: bytes) -> bytes:
    """Overwrite."""
    at = _at(data, place)
    return data[:at] + value + data[at + len(value) :]


def flip(data: bytes, place: int, bit: int) -> bytes:
    """Turn a bit over."""
    at = _at(data, place)
    return data[:at] + bytes(byte ^ 1 << bit for byte in data[at : at + 1]) + data[at + 1 :]


def insert(data: bytes, place: int, value: bytes) -> bytes:
    """Put in between."""
    at = _at(data, place)
    return data[:at] + value + data[at:]


def cut(data: bytes, *places: int) -> bytes:
    """Take a range out."""
    start, end = sorted(_at(data, place) for place in places)
    return data[:start] + data[end:]


def repeat(data: bytes, one: int, other: int, times: int) -> bytes:
    """Write a range several times."""
    start, end = sorted((_at(data, one), _at(data, other)))
    return data[:start] + data[start:end] * times + data[end:]


def splice(data: bytes, place: int, other: bytes, start: int) -> bytes:
    """Go on with another file."""
    return data[: _at(data, place)] + other[_at(other, start) :]


TAR_FIELDS: Final = {"name": 0, "mode": 100, "size": 124, "kind": 156, "link": 157, "magic": 257, "prefix": 345}


def headers(data: bytes) -> list[int]:
    """Where headers of a tar seem to begin."""
    return [at for at in range(0, len(data) - BLOCK + 1, BLOCK) if data[at + 257 : at + 262] == b"ustar"]


def set_field(data: bytes, place: int, field: str, value: bytes) -> bytes:
    """Write a field of a header, and mend its checksum."""
    found = headers(data)
    if not found:
        return data
    at = found[place % len(found)]
    return data[:at] + mended(data[at : at + BLOCK], field=(TAR_FIELDS[field], value)) + data[at + BLOCK :]
