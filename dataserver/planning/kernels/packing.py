"""Kernels that pack samples into sequences of limited length."""

import numpy as np

from dataserver.planning.kernels import kernel
from dataserver.planning.samples import I64


@kernel
def best_fit(tokens: I64, order: I64, seq_len: int) -> I64:
    """The sequence of each sample: in `order` to the fullest one with room, the lower on ties, else a new one.

    Open sequences stand in `room` and `number`, sorted; those without room for the least sample are dropped.
    """
    sequence = np.empty(len(tokens), np.int64)
    room, number = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.int64)
    open_, opened, least = 0, 0, seq_len
    for item in order:
        least = min(least, tokens[item])
    for item in order:
        fit = np.searchsorted(room[:open_], tokens[item])
        if fit < open_:
            left, chosen = room[fit] - tokens[item], number[fit]
        else:
            left, chosen = seq_len - tokens[item], opened
            opened += 1
            open_ += 1
        sequence[item] = chosen
        while fit > 0 and (room[fit - 1], number[fit - 1]) > (left, chosen):
            room[fit], number[fit] = room[fit - 1], number[fit - 1]
            fit -= 1
        room[fit], number[fit] = left, chosen
        if left < least:  # it stands first, and nothing fits it any more
            open_ -= 1
            for entry in range(fit, open_):
                room[entry], number[entry] = room[entry + 1], number[entry + 1]
    return sequence


@kernel
def first_fit(tokens: I64, order: I64, seq_len: int) -> I64:
    """The sequence of each sample: in `order` to the first one with room.

    `most` is a tree over the sequences that holds the largest room below each node.
    """
    leaves = 1
    while leaves < len(tokens):
        leaves *= 2
    most = np.full(2 * leaves, seq_len, np.int64)
    sequence = np.empty(len(tokens), np.int64)
    for item in order:
        node = 1
        while node < leaves:
            node *= 2
            if most[node] < tokens[item]:
                node += 1
        sequence[item] = node - leaves
        most[node] -= tokens[item]
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return sequence
