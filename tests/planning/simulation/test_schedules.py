"""The generators of operation lists: their order, closed forms of their makespans, memory counted by hand."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
from builders.pipelined import one_f_one_b
from hypothesis import given
from hypothesis import strategies as st
from planning.simulation.chains import equal_chain, shares

from dataserver.planning.simulation import Operation, OperationKind, simulate, stage_operations

F, B, I, *_ = OperationKind  # noqa: E741


@given(st.integers(1, 6), st.integers(1, 10), st.integers(1, 50), st.integers(1, 50))
def test_gpipe(stages: int, count: int, forward: int, backward: int) -> None:
    result = simulate(equal_chain([stage_operations(count, count)] * stages, count, forward, backward))
    assert result.makespan_ns == (count + stages - 1) * (forward + backward)
    shares(result, Fraction(stages - 1, count + stages - 1))
    assert result.peak_bytes.tolist() == [count] * stages  # everything is in flight


@given(st.integers(2, 6), st.integers(1, 10), st.integers(0, 4))
def test_memory_of_1f1b(stages: int, count: int, extra: int) -> None:
    result = simulate(equal_chain([one_f_one_b(s, stages, count, extra) for s in range(stages)], count, 1, 2))
    held = [min(stages - s + extra, count) for s in range(stages - 1)]
    assert result.peak_bytes.tolist() == [*held, 1]


def test_memory_of_a_frozen_stage_is_that_of_one_microbatch() -> None:
    frozen = [Operation(F, m) for m in range(4)]
    pipeline = equal_chain([frozen, one_f_one_b(1, 2, 4)], 4, 1, 2)
    assert simulate(pipeline).peak_bytes.tolist() == [1, 1]


def test_chunkflows_unequal_toy() -> None:
    # ChunkFlow (2503.02356): 4 sequences of unequal length on 4 stages leave 57.14 % of the time idle, equal ones
    # 42.8 %. Lengths 4, 2, 1 and 1 with backward = 2 forward give that number.
    lengths = np.array([4, 2, 1, 1])
    pipeline = equal_chain([one_f_one_b(s, 4, 4) for s in range(4)], 4, 1, 2)
    times = np.tile(lengths, (4, 1))
    unequal = simulate(replace(pipeline, forward_ns=times, backward_ns=2 * times))
    assert unequal.makespan_ns == 56
    shares(unequal, Fraction(4, 7))
