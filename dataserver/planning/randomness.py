"""Keyed randomness: raw 64-bit words of Philox 4x64-10, addressed by what they are for.

A draw is a pure function of (seed, operator, dataset, pass, sample, index), never of a worker, a rank or the order of
arrival. The mapping, which any language can repeat:

    key     = (seed, operator)
    counter = (index // 4, sample, pass, dataset)      # least significant word first
    word    = output[index % 4]

Philox 4x64-10 is from Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). numpy has the generator
but no way to evaluate many counters at once, which is what keyed draws need; the tests hold this one against numpy's.
"""

import hashlib
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_MULTIPLIER_0 = np.uint64(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = np.uint64(0xCA5A826395121157)
_WEYL_0 = 0x9E3779B97F4A7C15
_WEYL_1 = 0xBB67AE8584CAA73B
_MASK_64 = (1 << 64) - 1
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_ROUNDS = 10


class Operator(IntEnum):
    """What a draw is for. Numbers are part of the public contract: never reuse or change one."""

    SHARD_ORDER = 1
    """Order of the shards of one pass; the `sample` word is the shard number."""
    SAMPLE_ORDER = 2
    """Order of the samples within a shuffle window."""
    TASK = 3
    """Whether an image-text pair is understood or generated."""
    DIFFUSION_NOISE = 4
    """Noise added to a target image."""
    DIFFUSION_TIME = 5
    """Diffusion time of a target image."""
    PLAN_SEARCH = 6
    """Trials of the planner's search; the `sample` word is the step."""


def dataset_key(name: str) -> int:
    """The `dataset` word of a dataset: the first 8 bytes (little-endian) of the SHA-256 of its logical name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def draw(seed: int, operator: Operator, dataset: int, pass_: int, samples: U64) -> U64:
    """The first word of each sample's stream.

    Args:
        seed: the job's seed, in [0, 2**64).
        operator: what the words are for.
        dataset: `dataset_key` of the dataset.
        pass_: pass over the dataset.
        samples: uint64 [n].

    Returns:
        uint64 [n].
    """
    from dataserver.planning.kernels.draws import first_words  # a tenth of the time of `_philox`

    return first_words(seed, int(operator), dataset, pass_, samples)


def draws(seed: int, operator: Operator, dataset: int, pass_: int, sample: int, count: int) -> U64:
    """The first `count` words of one sample's stream, uint64 [count]."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    zeros = np.zeros(len(blocks), np.uint64)
    counter = (blocks, zeros + np.uint64(sample), zeros + np.uint64(pass_), zeros + np.uint64(dataset))
    return np.stack(_philox(counter, seed, int(operator)), axis=1).reshape(-1)[:count]


def _philox(counter: tuple[U64, U64, U64, U64], key_0: int, key_1: int) -> tuple[U64, U64, U64, U64]:
    """Philox 4x64-10 of many counters under one key."""
    x0, x1, x2, x3 = counter
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(x0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(x2, _MULTIPLIER_1)
        x0, x1, x2, x3 = high_1 ^ x1 ^ np.uint64(key_0), low_1, high_0 ^ x3 ^ np.uint64(key_1), low_0
        key_0 = (key_0 + _WEYL_0) & _MASK_64
        key_1 = (key_1 + _WEYL_1) & _MASK_64
    return x0, x1, x2, x3


def _multiply(a: U64, b: np.uint64) -> tuple[U64, U64]:
    """High and low words of the 128-bit products a * b."""
    a_low, a_high = a & _LOW_32, a >> _SHIFT_32
    b_low, b_high = b & _LOW_32, b >> _SHIFT_32
    cross_0 = a_high * b_low
    cross_1 = a_low * b_high
    carry = ((a_low * b_low) >> _SHIFT_32) + (cross_0 & _LOW_32) + (cross_1 & _LOW_32)
    high = a_high * b_high + (cross_0 >> _SHIFT_32) + (cross_1 >> _SHIFT_32) + (carry >> _SHIFT_32)
    return high, a * b
