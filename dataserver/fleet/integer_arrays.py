"""Arrays of integers in messages between servers: 1, 2, 4 or 8 bytes each, little-endian."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.plan.integers import WIDTHS, to_fewest_bytes


class PackedError(ValueError):
    """Bytes that are no such array; the message says which."""


def packed(values: I64) -> bytes:
    """Integers from 0 on, in as few bytes as the largest takes."""
    return to_fewest_bytes(values).tobytes()


def unpacked(what: str, data: bytes, count: int) -> I64:
    """So many integers. int64 [count].

    Raises:
        PackedError: it is another number of them, or one is beyond int64.
    """
    width = next((w for w in WIDTHS if len(data) == w * count), None)
    if width is None:
        raise PackedError(f"it has {len(data)} bytes for the {what} of {count} items; 1, 2, 4 or 8 each are required")
    values = np.frombuffer(data, f"<u{width}").astype(np.int64)
    if values.min(initial=0) < 0:
        raise PackedError(f"its {what} are beyond 63 bits")
    return values
