"""Numbers that every machine and version makes alike, and digests of what is found in them."""

import hashlib

import numpy as np

from dataserver.planning import I64


def numbers(seed: int, shape: int | tuple[int, ...], low: int, high: int) -> I64:
    """Scattered, from low to high, the same with every version of numpy."""
    found = np.arange(1, np.prod(shape, dtype=np.int64) + 1, dtype=np.uint64) * np.uint64(1 + 2 * seed)
    for factor, shift in ((0x9E3779B97F4A7C15, 31), (0xBF58476D1CE4E5B9, 29)):
        found *= np.uint64(factor)
        found ^= found >> np.uint64(shift)
    return low + (found % np.uint64(high - low + 1)).astype(np.int64).reshape(shape)


def digest(found: object) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of how it is written."""
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]
