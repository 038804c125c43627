"""Programs around the barriers of contrastive batches: their order, closed forms of makespans, memory by hand."""

from collections.abc import Callable

import numpy as np
import pytest
from builders.contrastive import batch_sync_operations, distmm_operations
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.simulation.chains import equal_chain, spelled

from dataserver.planning.simulation import (
    OperationKind,
    Operations,
    Pipeline,
    chain_edges,
    simulate,
)

F, B, I, *_ = OperationKind  # noqa: E741


def test_contrastive_lists_by_hand() -> None:
    assert spelled(batch_sync_operations(1, 2, 2, 2)) == "f0 f1 e0 i0 b0 b1 f2 f3 e1 i1 b2 b3"
    assert spelled(batch_sync_operations(0, 2, 2, 2)) == "f0 f1 b0 b1 f2 f3 b2 b3"
    assert spelled(distmm_operations(1, 2, 2, 3)) == "f0 f1 e0 i0 b0 f2 b1 f3 e1 i1 b2 f4 b3 f5 e2 i2 b4 b5"
    assert spelled(distmm_operations(0, 2, 2, 3)) == "f0 f1 f2 b0 f3 b1 f4 b2 f5 b3 b4 b5"


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 20), st.integers(1, 20), st.data())
def test_batch_sync(stages: int, size: int, groups: int, forward: int, backward: int, data: st.DataObject) -> None:
    """Groups follow each other: each fills and drains the pipeline, but the first stage ends a group for all."""
    spent = data.draw(st.lists(st.integers(0, 30), min_size=groups, max_size=groups))
    lists = [batch_sync_operations(s, stages, size, groups) for s in range(stages)]
    result = simulate(equal_chain(lists, size * groups, forward, backward, interaction=spent))
    assert result.makespan_ns == groups * (size + stages - 1) * (forward + backward) + sum(spent)
    assert result.peak_bytes.tolist() == [size] * stages


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20))
def test_distmm_fills_the_gap_at_the_barrier(stages: int, more: int, groups: int, forward: int, backward: int) -> None:
    """With groups no smaller than the pipeline is deep it is filled and drained once, as in 1F1B."""
    size = stages + more
    lists = [distmm_operations(s, stages, size, groups) for s in range(stages)]
    result = simulate(equal_chain(lists, size * groups, forward, backward, interaction=[0] * groups))
    assert result.makespan_ns == (size * groups + stages - 1) * (forward + backward)
    assert result.peak_bytes.tolist() == [size + (stages - 1 - s if groups > 1 else 0) for s in range(stages)]
    assert result.peak_bytes.max() <= 2 * size  # what the formula of its memory counts with


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.integers(0, 40))
def test_distmm_is_never_slower_than_batch_sync(stages: int, size: int, groups: int, extra: int, spent: int) -> None:
    interaction = [spent] * groups
    lists = [distmm_operations(s, stages, size, groups, extra) for s in range(stages)]
    plain = [batch_sync_operations(s, stages, size, groups) for s in range(stages)]
    ours, theirs = (
        simulate(equal_chain(x, size * groups, 7, 13, interaction=interaction)).makespan_ns for x in (lists, plain)
    )
    assert ours <= theirs


@pytest.mark.parametrize("generate", [batch_sync_operations, distmm_operations])
def test_no_backward_before_all_forwards_of_its_batch_on_all_ranks(generate: Callable[..., Operations]) -> None:
    """Two towers of different depth and speed meet in the interaction of their last stages."""
    stages, size, groups = (2, 1), 3, 4
    count = size * groups
    lists = [generate(s, n, size, groups) for n in stages for s in range(n)]
    random = np.random.default_rng(5)
    pipeline = Pipeline(
        num_stages=3,
        stage=np.arange(3),
        forward_ns=random.integers(1, 30, (3, count)),
        backward_ns=random.integers(1, 30, (3, count)),
        edges=chain_edges(2, count),
        operations=lists,
        interaction_ns=np.full((3, groups), 4),
    )
    timeline = simulate(pipeline)
    spans = {
        (node, o.kind, o.microbatch): (int(timeline.start_ns[node, i]), int(timeline.end_ns[node, i]))
        for node in range(3) for i, o in enumerate(lists[node])
    }  # fmt: skip
    for group in range(groups):
        mine = range(group * size, (group + 1) * size)
        ready = max(spans[node, F, m][1] for node in (1, 2) for m in mine)
        for node in (1, 2):
            start, end = spans[node, I, group]
            assert start >= ready
            assert min(spans[node, B, m][0] for m in mine) >= end
