"""The simulator against closed forms, hand-drawn cases and a slow reference."""

import numpy as np
import pytest
from builders.operations import operations_of
from builders.pipelined import one_f_one_b
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.simulation.chains import Node, build, chain, run
from planning.simulation.reference import fixed_point

from dataserver.planning.simulation import (
    Operation,
    OperationKind,
    Operations,
    PipelineDeadlockError,
    makespan_ns,
    simulate,
    stage_operations,
)

F, B = OperationKind.FORWARD, OperationKind.BACKWARD


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 100), st.integers(0, 100))
def test_equal_stages_have_the_closed_form(stages: int, extra: int, forward: int, backward: int) -> None:
    microbatches = stages - 1 + extra
    times = [[forward] * microbatches] * stages, [[backward] * microbatches] * stages
    result = run(*chain(*times))
    assert result.makespan_ns == (microbatches + stages - 1) * (forward + backward)
    if forward + backward:
        assert result.bubble_ppm == (stages - 1) * 1_000_000 // (microbatches + stages - 1)
    else:
        assert result.bubble_ppm == 0


def test_chunkflows_toy() -> None:
    # ChunkFlow (2503.02356): 4 microbatches of equal length on 4 stages leave 3/7 = 42.8 % of the time idle.
    result = run(*chain([[1] * 4] * 4, [[2] * 4] * 4))
    assert result.makespan_ns == 21
    assert result.bubble_ppm == 428_571


def test_hand_drawn_two_stages_two_microbatches() -> None:
    # stage 0:  F0 F0 F1 .. .. B0 B0 .. B1 B1          F0 = 2, F1 = 1, B = 2
    # stage 1:  .. .. F0 B0 B0 F1 B1 B1                F = 1, B = 2: B0 is done at 5, B1 at 8
    result = run(*chain([[2, 1], [1, 1]], [[2, 2], [2, 2]]))
    assert [s.tolist() for s in result.start_ns] == [[0, 2, 5, 8], [2, 3, 5, 6]]
    assert result.makespan_ns == 10
    assert result.busy_ns.tolist() == [7, 6]
    assert result.bubble_ppm == 350_000


def test_hand_drawn_join_of_two_encoders() -> None:
    # Encoder ranks 0 and 1 (stage 0) feed the one backbone rank 2 (stage 1): wave 0 needs both, wave 1 only rank 1.
    nodes = [
        Node(0, np.array([3, 1]), np.array([1, 1]), ((2,), ())),
        Node(0, np.array([5, 2]), np.array([1, 1]), ((2,), (2,))),
        Node(1, np.array([2, 2]), np.array([4, 4]), ((), ())),
    ]
    result = run(nodes, 2, 2)
    # Rank 0: F0 0-3, F1 3-4, B0 11-12, B1 (fed nobody) 12-13. Rank 1: F0 0-5, F1 5-7, B0 11-12, B1 17-18.
    # Backbone: F0 5-7, B0 7-11, F1 11-13, B1 13-17.
    assert [s.tolist() for s in result.start_ns] == [[0, 3, 11, 12], [0, 5, 11, 17], [5, 7, 11, 13]]
    assert result.makespan_ns == 18


@given(st.integers(0, 9), st.integers(1, 10), st.integers(1, 12), st.integers(0, 3))
def test_lists_are_1f1b(stage: int, stages: int, microbatches: int, extra: int) -> None:
    stage %= stages
    operations = one_f_one_b(stage, stages, microbatches, extra)
    assert [o.microbatch for o in operations if o.kind is F] == list(range(microbatches))
    assert [o.microbatch for o in operations if o.kind is B] == list(range(microbatches))
    warmup = min(stages - 1 - stage + extra if stage < stages - 1 else 0, microbatches)
    in_flight = most = 0
    for number, operation in enumerate(operations):
        in_flight += 1 if operation.kind is F else -1
        most = max(most, in_flight)
        assert number >= warmup or operation.kind is F
        assert in_flight >= 0
    assert most == min(warmup + 1, microbatches)  # activations held: what 1F1B is for


def test_lists_by_hand() -> None:
    assert list(stage_operations(1, 2)) == [Operation(F, 0), Operation(B, 0), Operation(F, 1), Operation(B, 1)]
    assert list(stage_operations(3, 1)) == [Operation(F, 0), Operation(B, 0)]
    kinds = "".join(o.kind.value[0] for o in stage_operations(3, 4))
    assert kinds == "fffbfbbb"


@st.composite
def joined(draw: st.DrawFn) -> tuple[list[Node], int, int]:
    """Stages of different widths; any node may feed any of the next stage, differently in every wave."""
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    microbatches = draw(st.integers(1, 5))
    first = np.concatenate([[0], np.cumsum(widths)])
    times = st.lists(st.integers(0, 20), min_size=microbatches, max_size=microbatches)
    nodes = []
    for stage, width in enumerate(widths):
        following = range(int(first[stage + 1]), int(first[stage + 2])) if stage + 1 < len(widths) else range(0)
        for _ in range(width):
            feeds = tuple(tuple(n for n in following if draw(st.booleans())) for _ in range(microbatches))
            nodes.append(Node(stage, np.array(draw(times)), np.array(draw(times)), feeds))
    return nodes, len(widths), microbatches


@settings(max_examples=100, deadline=None)
@given(joined(), st.integers(0, 3))
def test_joined_stages_equal_the_reference(pipeline: tuple[list[Node], int, int], extra: int) -> None:
    described = build(*pipeline, extra)
    found, expected = simulate(described), fixed_point(described)
    for node, stage in enumerate(described.stage):
        starts = [expected[node, o][0] for o in described.operations[int(stage)]]
        assert found.start_ns[node].tolist() == starts
    assert found.makespan_ns == makespan_ns(described) == max((end for _, end in expected.values()), default=0)


@settings(max_examples=50, deadline=None)
@given(joined(), st.data())
def test_slower_operations_never_end_a_step_earlier(pipeline: tuple[list[Node], int, int], data) -> None:  # type: ignore[no-untyped-def]
    nodes, stages, microbatches = pipeline
    node, wave = data.draw(st.integers(0, len(nodes) - 1)), data.draw(st.integers(0, microbatches - 1))
    slower = nodes[node].forward_ns.copy()
    slower[wave] += 7
    changed = [
        Node(n.stage, slower if i == node else n.forward_ns, n.backward_ns, n.feeds) for i, n in enumerate(nodes)
    ]
    before, after = run(nodes, stages, microbatches), run(changed, stages, microbatches)
    assert before.makespan_ns <= after.makespan_ns <= before.makespan_ns + 7


def test_a_routing_against_the_stages_is_a_deadlock() -> None:
    one = np.array([1])
    nodes = [Node(0, one, one, ((1,),)), Node(1, one, one, ((0,),))]
    with pytest.raises(PipelineDeadlockError, match=r"nodes \[0, 1\] wait for each other"):
        run(nodes, 2, 1)


def test_a_node_that_needs_more_waves_than_its_source_has_room_for_is_a_deadlock() -> None:
    # The last stage's list (F0 B0 F1 B1) on stage 0: it waits for the gradient of wave 0, which node 1 gives back only
    # after the forward of wave 1.
    times = np.array([1, 1])
    nodes = [Node(1, times, times, ((1,), (1,))), Node(0, times, times, ((), ()))]
    with pytest.raises(PipelineDeadlockError):
        run(nodes, 2, 2)


def test_no_nodes_and_no_microbatches() -> None:
    assert run([], 1, 3).makespan_ns == 0
    empty = np.zeros(0, np.int64)
    assert run([Node(0, empty, empty, ())], 1, 0).bubble_ppm == 0


def test_operations_are_a_sequence() -> None:
    whole = [Operation(kind, m, c) for m in range(3) for c in range(2) for kind in OperationKind]
    found = operations_of(whole)
    assert list(found) == whole
    assert [found[i] for i in range(-len(whole), len(whole))] == whole * 2
    for part in (slice(2, 5), slice(None), slice(4, None, -2), slice(3, 3)):
        assert isinstance(found[part], Operations)
        assert list(found[part]) == whole[part]
