"""Integers in as few bytes as the largest takes: what is hashed, and what servers send each other."""

from typing import Any, Final

from numpy.typing import NDArray

WIDTHS: Final = (1, 2, 4, 8)


def to_fewest_bytes(values: NDArray[Any]) -> NDArray[Any]:
    """The same integers, from 0 on, as little-endian ones of 1, 2, 4 or 8 bytes each."""
    largest = int(values.max(initial=0))
    width = next(w for w in WIDTHS if largest < 1 << 8 * w)
    return values.astype(f"<u{width}")
