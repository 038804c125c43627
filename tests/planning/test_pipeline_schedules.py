"""The generators of operation lists: their order, closed forms of their makespans, memory counted by hand."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.builders import one_f_one_b

from dataserver.planning.pipelined.programs import interleaved_operations
from dataserver.planning.simulation import (
    Operation,
    OperationKind,
    OrderScorer,
    OrderTimes,
    Pipeline,
    Timeline,
    batch_sync_operations,
    chain_edges,
    distmm_operations,
    simulate,
    stage_operations,
)

F, B, I = OperationKind  # noqa: E741


def chain(
    lists: Sequence[Sequence[Operation]], count: int, forward: int, backward: int, chunks: int = 1,
    interaction: Sequence[int] = (),
) -> Pipeline:  # fmt: skip
    """One node for each stage, equal times, one byte for each microbatch of each chunk; the last stage interacts."""
    shape = (len(lists) * chunks, count)
    spent = np.zeros((len(lists), len(interaction)), np.int64)
    spent[-1] = interaction
    return Pipeline(
        num_stages=len(lists),
        stage=np.arange(len(lists)),
        forward_ns=np.full(shape, forward),
        backward_ns=np.full(shape, backward),
        edges=chain_edges(len(lists), count, chunks),
        operations=lists,
        num_chunks=chunks,
        interaction_ns=spent if interaction else None,
        activation_bytes=np.ones(shape, np.int64),
    )


def spelled(operations: Sequence[Operation]) -> str:
    return " ".join(f"{o.kind[0]}{o.microbatch}{'abcdefgh'[o.chunk] if o.chunk else ''}" for o in operations)


def shares(timeline: Timeline, idle: Fraction) -> None:
    assert timeline.bubble_ppm == int(idle * 1_000_000)


@given(st.integers(1, 6), st.integers(1, 10), st.integers(1, 50), st.integers(1, 50))
def test_gpipe(stages: int, count: int, forward: int, backward: int) -> None:
    result = simulate(chain([stage_operations(count, count)] * stages, count, forward, backward))
    assert result.makespan_ns == (count + stages - 1) * (forward + backward)
    shares(result, Fraction(stages - 1, count + stages - 1))
    assert result.stage_bubble_ppm == (result.bubble_ppm,) * stages
    assert result.peak_bytes.tolist() == [count] * stages  # everything is in flight


@given(st.integers(2, 6), st.integers(1, 10), st.integers(0, 4))
def test_memory_of_1f1b(stages: int, count: int, extra: int) -> None:
    result = simulate(chain([one_f_one_b(s, stages, count, extra) for s in range(stages)], count, 1, 2))
    held = [min(stages - s + extra, count) for s in range(stages - 1)]
    assert result.peak_bytes.tolist() == [*held, 1]


def test_memory_of_a_frozen_stage_is_that_of_one_microbatch() -> None:
    frozen = [Operation(F, m) for m in range(4)]
    pipeline = chain([frozen, one_f_one_b(1, 2, 4)], 4, 1, 2)
    assert simulate(pipeline).peak_bytes.tolist() == [1, 1]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))
def test_interleaving(stages: int, chunks: int, rounds: int, forward: int, backward: int) -> None:
    """Narayanan et al. 2021, section 2.2: the idle time shrinks by the number of chunks."""
    count = stages * rounds
    lists = [interleaved_operations(s, stages, chunks, count) for s in range(stages)]
    result = simulate(chain(lists, count, forward, backward, chunks))
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
    assert interleaved_operations(1, 4, 1, 8) == one_f_one_b(1, 4, 8)


def test_interleaving_needs_whole_runs() -> None:
    with pytest.raises(ValueError, match="6 microbatches on 4 stages; interleaving needs a multiple"):
        interleaved_operations(0, 4, 2, 6)


def test_chunkflows_unequal_toy() -> None:
    # ChunkFlow (2503.02356): 4 sequences of unequal length on 4 stages leave 57.14 % of the time idle, equal ones
    # 42.8 %. Lengths 4, 2, 1 and 1 with backward = 2 forward give that number.
    lengths = np.array([4, 2, 1, 1])
    pipeline = chain([one_f_one_b(s, 4, 4) for s in range(4)], 4, 1, 2)
    times = np.tile(lengths, (4, 1))
    unequal = simulate(Pipeline(4, pipeline.stage, times, 2 * times, pipeline.edges))
    assert unequal.makespan_ns == 56
    shares(unequal, Fraction(4, 7))


def test_contrastive_lists_by_hand() -> None:
    assert spelled(batch_sync_operations(1, 2, 2, 2)) == "f0 f1 i0 b0 b1 f2 f3 i1 b2 b3"
    assert spelled(batch_sync_operations(0, 2, 2, 2)) == "f0 f1 b0 b1 f2 f3 b2 b3"
    assert spelled(distmm_operations(1, 2, 2, 3)) == "f0 f1 i0 b0 f2 b1 f3 i1 b2 f4 b3 f5 i2 b4 b5"
    assert spelled(distmm_operations(0, 2, 2, 3)) == "f0 f1 f2 b0 f3 b1 f4 b2 f5 b3 b4 b5"


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 20), st.integers(1, 20), st.data())
def test_batch_sync(stages: int, size: int, groups: int, forward: int, backward: int, data: st.DataObject) -> None:
    """Groups follow each other: each fills and drains the pipeline, but the first stage ends a group for all."""
    spent = data.draw(st.lists(st.integers(0, 30), min_size=groups, max_size=groups))
    lists = [batch_sync_operations(s, stages, size, groups) for s in range(stages)]
    result = simulate(chain(lists, size * groups, forward, backward, interaction=spent))
    assert result.makespan_ns == groups * (size + stages - 1) * (forward + backward) + sum(spent)
    assert result.peak_bytes.tolist() == [size] * stages


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20))
def test_distmm_fills_the_gap_at_the_barrier(stages: int, more: int, groups: int, forward: int, backward: int) -> None:
    """With groups no smaller than the pipeline is deep it is filled and drained once, as in 1F1B."""
    size = stages + more
    lists = [distmm_operations(s, stages, size, groups) for s in range(stages)]
    result = simulate(chain(lists, size * groups, forward, backward, interaction=[0] * groups))
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
        simulate(chain(x, size * groups, 7, 13, interaction=interaction)).makespan_ns for x in (lists, plain)
    )
    assert ours <= theirs


@pytest.mark.parametrize("generate", [batch_sync_operations, distmm_operations])
def test_no_backward_before_all_forwards_of_its_group_on_all_ranks(generate: type[list[Operation]]) -> None:
    """Two towers of different depth and speed meet in the interaction of their last stages."""
    stages, size, groups = (2, 1), 3, 4
    count = size * groups
    lists = [generate(s, n, size, groups) for n in stages for s in range(n)]  # type: ignore[call-arg]
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
    scorer, times = OrderScorer.of(pipeline), OrderTimes.of(pipeline)
    inside = np.concatenate([size * g + random.permutation(size) for g in range(groups)])
    again = Pipeline(3, pipeline.stage, pipeline.forward_ns[:, inside], pipeline.backward_ns[:, inside],
                     pipeline.edges, operations=lists, interaction_ns=pipeline.interaction_ns)  # fmt: skip
    assert scorer.makespans(times, inside[None]).tolist() == [simulate(again).makespan_ns]
    with pytest.raises(ValueError, match="takes a microbatch out of its contrastive batch of 3"):
        scorer.makespans(times, np.arange(count)[::-1][None])
