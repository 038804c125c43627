"""Kernels that pack samples into sequences of limited length."""

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.kernels.compiler import kernel, part

MOVES_AT_ONCE = 1 << 22
"""Open sequences that best fit shifts between two yield points, about: some milliseconds."""


def best_fit(tokens: I64, order: I64, seq_len: int) -> I64:
    """The sequence of each sample: in `order` to the fullest one with room, the lower on ties, else a new one.

    Open sequences stand sorted in key[:held], as room << 32 | number: room is at most 2^30 (`packing.MAX_SEQ_LEN`), and
    numbers are below 2^32. Those without room for the least sample are dropped.
    """
    sequence, key = np.empty((2, len(tokens)), np.int64)
    least, state = int(tokens.min(initial=seq_len)), np.zeros(3, np.int64)
    while _best_fit(tokens, order, seq_len, least, sequence, key, state, MOVES_AT_ONCE):
        yield_point()
    return sequence


@kernel
def _best_fit(
    tokens: I64, order: I64, seq_len: int, least: int, sequence: I64, key: I64, state: I64, at_once: int
) -> bool:
    """Go on from `state`: samples placed, sequences open, and opened; zeros at first. Whether samples are left."""
    placed, held, opened, moved = state[0], state[1], state[2], 0
    while placed < len(order) and moved < at_once:
        item = order[placed]
        placed += 1
        moved += 32  # about what its two searches take
        fit = _first_not_below(key, held, tokens[item] << 32)
        if fit < held:
            left, chosen = (key[fit] >> 32) - tokens[item], key[fit] & 0xFFFFFFFF
        else:
            left, chosen = seq_len - tokens[item], opened
            opened += 1
            held += 1
        sequence[item] = chosen
        if left < least:
            held -= 1
            moved += held - fit
            for entry in range(fit, held):
                key[entry] = key[entry + 1]
            continue
        # Its room fell, so it moves towards the front; a new sequence comes from behind the last.
        place = _first_not_below(key, fit, left << 32 | chosen)
        moved += fit - place
        for entry in range(fit, place, -1):
            key[entry] = key[entry - 1]
        key[place] = left << 32 | chosen
    state[0], state[1], state[2] = placed, held, opened
    return bool(placed < len(order))


@part
def _first_not_below(key: I64, size: int, value: int) -> int:
    """Where a value belongs in the first `size` of ascending keys."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if key[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low
