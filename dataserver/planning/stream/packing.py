"""Packing samples into sequences. Never splits or drops a sample."""

import numpy as np

from dataserver.planning import I64, Bool, yield_point
from dataserver.planning.balancing import check, lower_bound, plain

MAX_SEQ_LEN = 2**30
"""Longest sequence that a packer takes."""
_LOOKS_PER_SAMPLE = 16
_LOOKS_BETWEEN = 64
"""Samples that are packed one by one between two yield points."""


def one_per_sequence(tokens: I64) -> I64:
    """No packing: sequence i holds sample i. int64 [n]."""
    return np.arange(len(tokens), dtype=np.int64)


def best_fit_decreasing(tokens: I64, seq_len: int) -> I64:
    """Each sample, largest first, goes to the fullest sequence that still has room; a new one is opened if none has.

    Best-fit decreasing (Johnson 1973): at most 11/9 of the optimal number of sequences + 4. Ties go to the earlier
    sample and sequence. O(n log n) and the shifting of a sorted array.

    Args:
        tokens: int64 [n], each in [1, seq_len].
        seq_len: capacity of a sequence.

    Returns:
        int64 [n]: the sequence of each sample; sequences are numbered from 0 in the order of their first samples.

    Raises:
        ValueError: a sample does not fit a sequence.
    """
    from dataserver.planning.kernels import packing

    tokens, order = _largest_first(tokens, seq_len)
    return number_by_first(packing.best_fit(tokens, order, seq_len))


def best_fit_within(tokens: I64, items: I64, seq_len: int, budget: I64) -> I64:
    """Pack as `best_fit_decreasing` does, for sequences that also have budgets of other items.

    O(n x sequences): a sequence with room for the tokens may have none for the rest.

    Args:
        tokens: int64 [n], each in [1, seq_len].
        items: int64 [n, kinds], each at most `budget`.
        seq_len: capacity of a sequence.
        budget: int64 [kinds], of a sequence.

    Raises:
        ValueError: a sample does not fit a sequence.
    """
    tokens, order = _largest_first(tokens, seq_len)
    over = np.flatnonzero((items > budget).any(axis=1))
    if len(over):
        raise ValueError(
            f"sample {int(over[0])} has {items[over[0]].tolist()} images, clips and videos; a sequence holds "
            f"{budget.tolist()}: raise the budget of packing, or split such samples (documents)"
        )
    open_ = _Open(len(tokens), seq_len, budget)
    sequence = np.empty(len(tokens), np.int64)
    for number, sample in enumerate(order.tolist()):
        if not number % _LOOKS_BETWEEN:
            yield_point()
        fits, left = open_.fitting(tokens[sample], items[sample])
        chosen = int(np.where(fits, left, seq_len + 1).argmin()) if fits.any() else open_.add()
        sequence[sample] = open_.take(chosen, tokens[sample], items[sample])
    return number_by_first(sequence)


def balanced_within(
    tokens: I64, loads: I64, items: I64, seq_len: int, budget: I64, num_sequences: int, packed: I64
) -> I64:
    """Sequences of about equal cost, where a sequence has a budget of other things too.

    Samples, costliest first, go to the sequence of least cost that has room, of `num_sequences`; as `packed`, which
    `best_fit_within` found, where that leaves one without room. There are no exchanges.
    """
    open_, costs = _Open(num_sequences, seq_len, budget, num_sequences), np.zeros(num_sequences, np.int64)
    sequence = np.empty(len(tokens), np.int64)
    for number, sample in enumerate(np.argsort(-loads, kind="stable").tolist()):
        if not number % _LOOKS_BETWEEN:
            yield_point()
        fits, _ = open_.fitting(tokens[sample], items[sample])
        if not fits.any():
            return packed
        candidates = np.flatnonzero(fits)
        chosen = int(candidates[costs[candidates].argmin()])
        sequence[sample] = open_.take(chosen, tokens[sample], items[sample])
        costs[chosen] += loads[sample]
    return number_by_first(sequence)


class _Open:
    """Sequences with what each has room for."""

    def __init__(self, most: int, seq_len: int, budget: I64, opened: int = 0) -> None:
        self._tokens = np.full(most, seq_len, np.int64)
        self._items = np.repeat(budget[None], most, axis=0)
        self._opened = opened

    def fitting(self, tokens: int, items: I64) -> tuple[Bool, I64]:
        """Which have room, bool [opened], and the tokens that would then be left, int64 [opened]."""
        left = self._tokens[: self._opened] - tokens
        return (left >= 0) & (self._items[: self._opened] >= items).all(axis=1), left

    def add(self) -> int:
        """Open another sequence, and return its number."""
        self._opened += 1
        return self._opened - 1

    def take(self, sequence: int, tokens: int, items: I64) -> int:
        """Take the room of a sample in one, whose number comes back."""
        self._tokens[sequence] -= tokens
        self._items[sequence] -= items
        return sequence


def balanced(tokens: I64, loads: I64, seq_len: int, num_sequences: int | None = None) -> I64:
    """Sequences of equal cost rather than full ones.

    Sequences of equal length differ in cost by the squares of their samples: 50 + 50 tokens cost 5000 of attention,
    30 + 70 cost 5800. Samples, costliest first, go to the sequence of least cost that has room (or, where that runs out
    of room, by best fit). Then exchanges relieve the costliest sequence; where none helps, the next costliest, and so
    on. With a few percent of the tokens to spare costs come out nearly equal; in the fewest possible sequences there is
    next to no freedom.

    Args:
        tokens: int64 [n], each in [1, seq_len].
        loads: int64 [n], the cost of each sample; the cost of a sequence is their sum, as in packed attention.
        seq_len: capacity of a sequence.
        num_sequences: sequences to fill, or as many as best fit needs.

    Returns:
        int64 [n]: the sequence of each sample; sequences are numbered from 0 in the order of their first samples.

    Raises:
        ValueError: a sample does not fit a sequence, or no way to pack the samples in so few sequences was found.
    """
    from dataserver.planning.kernels import greedy, packing, search

    tokens, order = _largest_first(tokens, seq_len)
    if not len(tokens):
        return tokens
    fullest = packing.best_fit(tokens, order, seq_len)
    fewest = int(fullest.max()) + 1
    bins = fewest if num_sequences is None else num_sequences
    check(loads, bins)
    costs = plain(loads)
    by_cost = np.argsort(-costs, kind="stable")
    yield_point()
    seed, left_over = greedy.longest_first_within(costs, tokens, by_cost, bins, len(tokens), seq_len)
    if left_over >= 0:
        if fewest > bins:
            raise ValueError(
                f"{len(tokens)} samples of {int(tokens.sum())} tokens take {fewest} sequences of {seq_len}, there are "
                f"{bins}; raise the number of sequences"
            )
        seed = fullest
    bound = lower_bound(costs, bins)
    share = -(-int(costs.sum()) // bins)
    targets = np.array([bound + (bound >> 12), share + (share >> 12)], np.int64)
    yield_point()
    items = search.Items(costs, tokens, by_cost)
    budget = _LOOKS_PER_SAMPLE * len(tokens)
    packed, _ = search.improve(items, seed, bins, len(tokens), seq_len, targets, budget, True)
    yield_point()
    return number_by_first(packed)


def number_by_first(bin_of: I64) -> I64:
    """The same bins, numbered from 0 in the order of their first members. int64 [n]."""
    return number_by_first_of_each(bin_of, np.zeros_like(bin_of), 1, int(bin_of.max(initial=-1)) + 1)


def number_by_first_of_each(bin_of: I64, owner: I64, num_owners: int, num_bins: int) -> I64:
    """`number_by_first` of the members of each owner, who has `num_bins` bins of its own. int64 [n]."""
    own = owner * num_bins + bin_of
    first = np.full(num_owners * num_bins, len(own))
    first[own[::-1]] = np.arange(len(own))[::-1]
    numbers = np.argsort(np.argsort(first.reshape(num_owners, num_bins), axis=1, kind="stable"), axis=1)
    numbered: I64 = numbers.ravel()[own]
    return numbered


def _largest_first(tokens: I64, seq_len: int) -> tuple[I64, I64]:
    """The tokens as kernels take them, and the order of falling size; refuses samples that do not fit."""
    if not 1 <= seq_len <= MAX_SEQ_LEN:
        raise ValueError(f"sequences of {seq_len} tokens; their length must lie in [1, {MAX_SEQ_LEN}]")
    wrong = np.flatnonzero((tokens < 1) | (tokens > seq_len))
    if len(wrong):
        raise ValueError(
            f"sample {int(wrong[0])} has {int(tokens[wrong[0]])} tokens; a sequence holds samples of 1 to {seq_len}: "
            "truncate or filter it, or raise seq_len"
        )
    return plain(tokens), np.argsort(-tokens, kind="stable")
