"""Kernels for keyed draws: the first words of many samples, and many words of one."""

import numpy as np
from numpy.typing import NDArray

from dataserver.planning.kernels.compiler import high_word, inlined_part, kernel

U64 = NDArray[np.uint64]

_MULTIPLIER_0 = np.uint64(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = np.uint64(0xCA5A826395121157)
_WEYL_0 = np.uint64(0x9E3779B97F4A7C15)
_WEYL_1 = np.uint64(0xBB67AE8584CAA73B)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_ZERO = np.uint64(0)
_ROUNDS = 10


def first_words(seed: int, operator: int, dataset: int, epoch: int, samples: U64) -> U64:
    """The first word of each sample's stream, as `randomness.draw` says. uint64 [n]."""
    words = np.empty_like(samples)
    _first_words(np.array([seed, operator, dataset, epoch], np.uint64), samples, words)
    return words


def words_of(seed: int, operator: int, dataset: int, epoch: int, sample: int, count: int) -> U64:
    """The first words of one sample's stream, as `randomness.draws` says. uint64 [count]."""
    blocks = np.empty((-(-count // 4), 4), np.uint64)
    _words_of(np.array([seed, operator, dataset, epoch, sample], np.uint64), blocks)
    return blocks.reshape(-1)[:count]


@high_word
def _high(a: np.uint64, b: np.uint64) -> np.uint64:
    """High word of the 128-bit product, which processors have an instruction for."""
    a_low, a_high, b_low, b_high = a & _LOW_32, a >> _SHIFT_32, b & _LOW_32, b >> _SHIFT_32
    middle = a_high * b_low + ((a_low * b_low) >> _SHIFT_32)
    carry = (middle & _LOW_32) + a_low * b_high
    return a_high * b_high + (middle >> _SHIFT_32) + (carry >> _SHIFT_32)


@inlined_part
def _philox(
    x0: np.uint64, x1: np.uint64, x2: np.uint64, x3: np.uint64, key_0: np.uint64, key_1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Philox 4x64-10 at a counter, least significant word first."""
    for _ in range(_ROUNDS):
        high_0, high_1 = _high(x0, _MULTIPLIER_0), _high(x2, _MULTIPLIER_1)
        x0, x1, x2, x3 = high_1 ^ x1 ^ key_0, x2 * _MULTIPLIER_1, high_0 ^ x3 ^ key_1, x0 * _MULTIPLIER_0
        key_0, key_1 = key_0 + _WEYL_0, key_1 + _WEYL_1
    return x0, x1, x2, x3


@kernel
def _first_words(numbers: U64, samples: U64, words: U64) -> None:
    """Fill in `words`: those at (0, sample, pass, dataset) under (seed, operator)."""
    for i in range(len(samples)):
        words[i], _, _, _ = _philox(_ZERO, samples[i], numbers[3], numbers[2], numbers[0], numbers[1])


@kernel
def _words_of(numbers: U64, blocks: U64) -> None:
    """Fill in `blocks`, [n, 4]: those at (block, sample, pass, dataset) under (seed, operator)."""
    for i in range(len(blocks)):
        found = _philox(np.uint64(i), numbers[4], numbers[3], numbers[2], numbers[0], numbers[1])
        blocks[i, 0], blocks[i, 1], blocks[i, 2], blocks[i, 3] = found
