from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.packing import best_fit_decreasing, one_per_sequence


def optimal_sequences(tokens: list[int], seq_len: int) -> int:
    """Fewest sequences, by trying every assignment."""
    for count in range(1, len(tokens) + 1):
        for choice in product(range(count), repeat=len(tokens)):
            if all(sum(t for t, c in zip(tokens, choice, strict=True) if c == s) <= seq_len for s in range(count)):
                return count
    return 0


@given(st.lists(st.integers(1, 50), max_size=60), st.just(50))
def test_capacity_and_nothing_lost(tokens: list[int], seq_len: int) -> None:
    sequence = best_fit_decreasing(np.array(tokens, np.int64), seq_len)
    assert len(sequence) == len(tokens)
    count = int(sequence.max(initial=-1)) + 1
    assert set(sequence.tolist()) == set(range(count))  # numbered without gaps, none is empty
    assert list(dict.fromkeys(sequence.tolist())) == list(range(count))  # by their first samples
    filled = np.bincount(sequence, weights=tokens, minlength=count)
    assert (filled <= seq_len).all()
    # Any two sequences hold more than one could: otherwise the later one would not have been opened.
    assert all(a + b > seq_len for i, a in enumerate(filled) for b in filled[:i])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_close_to_the_optimum(tokens: list[int]) -> None:
    sequence = best_fit_decreasing(np.array(tokens, np.int64), 12)
    assert 9 * (int(sequence.max()) + 1) <= 11 * optimal_sequences(tokens, 12) + 36
    assert int(sequence.max()) + 1 <= optimal_sequences(tokens, 12) + 1


def test_best_fit_takes_the_fullest_sequence() -> None:
    # 6 and 4, then 5, 3 and 2, then 1; numbered by their first samples.
    assert best_fit_decreasing(np.array([1, 2, 3, 4, 5, 6]), 10).tolist() == [0, 1, 1, 2, 1, 2]
    # Of two that have room, the one with less of it: 3 goes to 7 rather than to 6.
    assert best_fit_decreasing(np.array([6, 3, 7]), 10).tolist() == [0, 1, 1]


def test_ties_go_to_the_earlier_sample_and_the_earlier_sequence() -> None:
    assert best_fit_decreasing(np.array([5, 5, 5, 5]), 10).tolist() == [0, 0, 1, 1]
    assert best_fit_decreasing(np.array([6, 6, 4, 4]), 10).tolist() == [0, 1, 0, 1]


def test_one_per_sequence() -> None:
    assert one_per_sequence(np.array([9, 1, 5])).tolist() == [0, 1, 2]
    assert one_per_sequence(np.zeros(0, np.int64)).tolist() == []
    assert best_fit_decreasing(np.zeros(0, np.int64), 10).tolist() == []
