"""Packing samples into sequences."""

from bisect import bisect_left, insort

import numpy as np

from dataserver.planning.samples import I64


def one_per_sequence(tokens: I64) -> I64:
    """No packing: sequence i holds sample i. int64 [n]."""
    return np.arange(len(tokens), dtype=np.int64)


def best_fit_decreasing(tokens: I64, seq_len: int) -> I64:
    """Each sample, largest first, goes to the fullest sequence that still has room; a new one is opened if none has.

    Best-fit decreasing (Johnson 1973): at most 11/9 of the optimal number of sequences + 4. O(n log n). Never splits or
    drops a sample.

    Args:
        tokens: int64 [n], each in [1, seq_len].
        seq_len: capacity of a sequence.

    Returns:
        int64 [n]: the sequence of each sample; sequences are numbered from 0 in the order of their first samples.
    """
    sequence = np.empty(len(tokens), np.int64)
    room: list[tuple[int, int]] = []  # (tokens left, sequence), sorted
    opened = 0
    for item in np.argsort(-tokens, kind="stable"):
        size = int(tokens[item])
        fit = bisect_left(room, (size, -1))
        if fit < len(room):
            left, number = room.pop(fit)
        else:
            left, number, opened = seq_len, opened, opened + 1
        sequence[item] = number
        insort(room, (left - size, number))
    return number_by_first(sequence)


def number_by_first(group: I64) -> I64:
    """The same groups, numbered from 0 in the order of their first members. int64 [n]."""
    _, first, which = np.unique(group, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    numbered: I64 = number[which]
    return numbered
