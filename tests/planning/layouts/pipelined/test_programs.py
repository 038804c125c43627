"""Interleaved 1F1B: its order, and closed forms of its makespans."""

from fractions import Fraction

import pytest
from builders.pipelined import one_f_one_b
from hypothesis import given
from hypothesis import strategies as st
from planning.simulation.chains import equal_chain, shares, spelled

from dataserver.planning.layouts.pipelined.programs import interleaved_operations
from dataserver.planning.simulation import simulate


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))
def test_interleaving(stages: int, chunks: int, rounds: int, forward: int, backward: int) -> None:
    """Narayanan et al. 2021, section 2.2: the idle time shrinks by the number of chunks."""
    count = stages * rounds
    lists = [interleaved_operations(s, stages, chunks, count) for s in range(stages)]
    result = simulate(equal_chain(lists, count, forward, backward, chunks))
    assert result.makespan_ns == (count * chunks + stages - 1) * (forward + backward)
    shares(result, Fraction(stages - 1, chunks * count + stages - 1))


def test_interleaving_as_megatron_does_it() -> None:
    # Narayanan et al. 2021, figure 4 (4 stages, 8 microbatches, 2 chunks): the last device begins with its first chunk
    # of microbatches 0-3, then one forward and one backward of the second chunk in turn.
    last = spelled(interleaved_operations(3, 4, 2, 8))
    assert last.startswith("f0 f1 f2 f3 f0b b0b f1b b1b f2b b2b f3b b3b f4 b0 f5 b1 f6 b2 f7 b3 f4b b4b")
    first = spelled(interleaved_operations(0, 4, 2, 8))
    assert first.startswith("f0 f1 f2 f3 f0b f1b f2b f3b f4 f5 f6 b0b f7 b1b f4b b2b")
    assert first.endswith("b4 b5 b6 b7")


def test_one_chunk_is_1f1b() -> None:
    assert list(interleaved_operations(1, 4, 1, 8)) == list(one_f_one_b(1, 4, 8))


def test_interleaving_needs_whole_runs() -> None:
    with pytest.raises(ValueError, match="6 microbatches on 4 stages; interleaving needs a multiple"):
        interleaved_operations(0, 4, 2, 6)
