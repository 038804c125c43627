"""The simulator on any lists: against a slow reference, memory from the times, the critical path, other orders."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from builders.operations import operations_of
from builders.pipelined import one_f_one_b
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.simulation.reference import B, Definitions, F, I, fixed_point, peak_bytes, pipelines

from dataserver.planning import I64
from dataserver.planning.layouts.pipelined.programs import interleaved_operations
from dataserver.planning.simulation import (
    Operation,
    OrderScorer,
    Pipeline,
    PipelineDeadlockError,
    chain_edges,
    critical_path,
    makespan_ns,
    simulate,
    stage_operations,
)


@settings(max_examples=200, deadline=None)
@given(pipelines())
def test_any_lists_equal_the_reference(pipeline: Pipeline) -> None:
    found, expected = simulate(pipeline), fixed_point(pipeline)
    for node, operations in enumerate(pipeline.operations):
        spans = list(zip(found.start_ns[node].tolist(), found.end_ns[node].tolist(), strict=True))
        assert spans[: len(operations)] == [expected[node, o] for o in operations]
        assert set(spans[len(operations) :]) <= {(-1, -1)}
        assert found.busy_ns[node] == sum(end - start for start, end in spans)
    assert found.makespan_ns == max((end for _, end in expected.values()), default=0)


@settings(max_examples=100, deadline=None)
@given(pipelines(shortest=1))
def test_peak_memory_is_what_the_times_say(pipeline: Pipeline) -> None:
    found, times = simulate(pipeline), fixed_point(pipeline)
    assert found.peak_bytes.tolist() == [peak_bytes(pipeline, times, node) for node in range(len(pipeline.stage))]


@settings(max_examples=200, deadline=None)
@given(pipelines())
def test_critical_path_is_tight(pipeline: Pipeline) -> None:
    """It begins at 0, ends with the step, and nothing on it waits: so it is as long as the step."""
    timeline, definitions = simulate(pipeline), Definitions(pipeline)
    path, events = critical_path(pipeline, timeline), definitions.events()
    assert path[0].start_ns == 0
    assert path[-1].end_ns == timeline.makespan_ns
    length = sum(definitions.duration((o.node, o.operation)) for o in path)
    for before, after in pairwise(path):
        needs = definitions.needs((after.node, after.operation), events)
        delay = needs.get((before.node, before.operation))
        if after.operation.kind is I and delay is None:
            delay = 0 if before.node == after.node else None
        if before.node == after.node and after.start_ns == before.end_ns:
            delay = 0
        assert delay is not None
        assert after.start_ns == before.end_ns + delay
        length += delay
    assert length == timeline.makespan_ns


def test_critical_path_by_hand() -> None:
    # Stage 0: F0 0-2, F1 2-3, B0 12-14, B1 19-21. Stage 1 (arrival + 3): F0 5-6, B0 6-9, F1 9-11, B1 11-16.
    pipeline = Pipeline(
        num_stages=2,
        stage=np.array([0, 1]),
        forward_ns=np.array([[2, 1], [1, 2]]),
        backward_ns=np.array([[2, 2], [3, 5]]),
        edges=chain_edges(2, 2),
        operations=[one_f_one_b(s, 2, 2) for s in range(2)],
        transfer_ns=np.array([3, 3]),
    )
    path = critical_path(pipeline, simulate(pipeline))
    assert [(o.node, o.operation.kind, o.operation.microbatch, o.start_ns, o.end_ns) for o in path] == [
        (0, F, 0, 0, 2),
        (1, F, 0, 5, 6),
        (1, B, 0, 6, 9),
        (1, F, 1, 9, 11),
        (1, B, 1, 11, 16),
        (0, B, 1, 19, 21),
    ]


def test_an_empty_pipeline_has_no_critical_path() -> None:
    times, edges = np.zeros((2, 0, 3), np.int64), np.zeros((0, 3), np.int64)
    pipeline = Pipeline(1, np.zeros(0, np.int64), *times, edges, [operations_of([])])
    assert critical_path(pipeline, simulate(pipeline)) == []


def chain(lists: Sequence[Sequence[Operation]], count: int, chunks: int = 1, groups: int = 0) -> Pipeline:
    ones = np.ones((len(lists) * chunks, count), np.int64)
    return Pipeline(
        num_stages=len(lists),
        stage=np.arange(len(lists)),
        forward_ns=ones,
        backward_ns=ones,
        edges=chain_edges(len(lists), count, chunks),
        operations=[*map(operations_of, lists)],
        num_chunks=chunks,
        interaction_ns=np.ones((len(lists), groups), np.int64) if groups else None,
    )


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[Operation(F, 0), Operation(F, 0)]], "stage 0 lists .*twice"),
        ([[Operation(F, 1)]], "stage 0 lists .*the pipeline has 1 microbatches"),
        ([[Operation(F, 0, 1)]], "1 chunks"),
        ([[Operation(I, 0)]], "0 contrastive batches"),
        ([[], [Operation(F, 0)]], "block 0 feeds block 1 in microbatch 0, but only one of them lists that pass"),
        ([[Operation(F, 0), Operation(B, 0)], [Operation(F, 0)]], "block 0 feeds block 1"),
    ],
)
def test_lists_that_mean_nothing_are_refused(lists: list[list[Operation]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(chain(lists, 1))


def test_a_backward_needs_its_forward_and_a_barrier_its_group() -> None:
    with pytest.raises(PipelineDeadlockError, match="backward of microbatch 0, chunk 0, without its forward"):
        simulate(chain([[Operation(B, 0), Operation(F, 0)]], 1))
    crossed = [Operation(F, 0), Operation(I, 0), Operation(F, 1), Operation(B, 0), Operation(B, 1)]
    with pytest.raises(PipelineDeadlockError, match=r"the interaction of contrastive batch 0 before .* 0 to 1"):
        simulate(chain([crossed], 2, groups=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_ns": np.ones((3, 4), np.int64)}, r"forward_ns has shape \(3, 4\).* require \(2, 4\)"),
        ({"backward_ns": -np.ones((2, 4), np.int64)}, "backward_ns holds -1"),
        ({"transfer_ns": np.zeros(3, np.int64)}, "transfer_ns has shape"),
        ({"edges": np.array([[4, 0, 1]])}, r"microbatches of edges lie in \[4, 4\]; \[0, 4\)"),
        ({"edges": np.array([[0, 0, 2]])}, "blocks of edges"),
        ({"stage": np.array([0, 2])}, "stages lie in"),
        ({"operations": [stage_operations(4, 4)]}, "1 operation lists for 2 stages"),
        ({"interaction_ns": np.ones((2, 3), np.int64)}, "4 microbatches do not divide into 3 contrastive batches"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(replace(chain([stage_operations(4, 4)] * 2, 4), **change))  # type: ignore[arg-type]


@st.composite
def order_problems(draw: st.DrawFn) -> tuple[Pipeline, I64]:
    """An encoder that all ranks share, ranks with virtual stages or not, a generator; any of the schedules."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, stages, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    extra, joined = draw(st.integers(0, 2)), chunks == 1 and draw(st.booleans())
    count = stages * draw(st.integers(1, 3))
    own = chain_edges(stages, count, chunks)
    edges = [own + np.array([0, r, r]) * stages * chunks for r in range(ranks)]
    stage = np.tile(np.arange(stages), ranks)
    total = stages
    if joined:
        total, front = stages + 2, ranks * stages
        for r in range(ranks):
            for m in range(count):
                edges.append(np.array([[m, front, r * stages], [m, (r + 1) * stages - 1, front + 1]]))
        stage = np.concatenate([stage + 1, [0, total - 1]])
    lists = [one_f_one_b(s, total, count, extra) for s in range(total)]
    if chunks > 1:
        lists = [interleaved_operations(s, stages, chunks, count) for s in range(stages)]
    joins = np.concatenate(edges)
    delay = random.integers(0, 9, joins[:, 1:].max(initial=0) + 1)[joins[:, 1]] if random.random() < 0.5 else None
    pipeline = Pipeline(
        num_stages=total,
        stage=stage,
        forward_ns=random.integers(0, 30, (len(stage) * chunks, count)),
        backward_ns=random.integers(0, 30, (len(stage) * chunks, count)),
        edges=joins,
        operations=lists,
        num_chunks=chunks,
        transfer_ns=delay,
    )
    return pipeline, random.permuted(np.tile(np.arange(count), (draw(st.integers(0, 20)), 1)), axis=1)


@settings(max_examples=60, deadline=None)
@given(order_problems())
def test_orders_score_as_the_simulator_has_them(problem: tuple[Pipeline, I64]) -> None:
    pipeline, orders = problem
    scores = OrderScorer.of(pipeline).makespans(orders)
    for order, score in zip(orders, scores.tolist(), strict=True):
        forward, backward = pipeline.forward_ns[:, order], pipeline.backward_ns[:, order]
        timed = replace(pipeline, forward_ns=forward, backward_ns=backward)
        assert score == simulate(timed).makespan_ns == makespan_ns(timed)


def test_makespans_need_no_graph_and_edges_may_be_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = chain([stage_operations(2, 3), stage_operations(1, 3)], 3)
    wanted = simulate(pipeline).makespan_ns
    monkeypatch.setattr(sys.modules[makespan_ns.__module__], "build_graph", None)
    assert makespan_ns(replace(pipeline, edges=np.tile(pipeline.edges, (2, 1)))) == wanted > 0


def test_makespans_of_lists_that_wait_for_each_other_are_refused() -> None:
    crossed = chain([stage_operations(1, 2), stage_operations(2, 2)], 2)
    with pytest.raises(PipelineDeadlockError, match="wait for each other"):
        makespan_ns(crossed)


def test_compiled_and_interpreted_kernels_agree() -> None:
    program = """
import numpy as np
from dataserver.planning.simulation import (
    OrderScorer,
    Pipeline,
    chain_edges,
    simulate,
    stage_operations,
)
random = np.random.default_rng(1)
forward, backward = random.integers(0, 2**50, (2, 4, 9))
operations = [stage_operations(n, 9) for n in (5, 4, 3, 1)]
pipeline = Pipeline(4, np.arange(4), forward, backward, chain_edges(4, 9), operations)
orders = random.permuted(np.tile(np.arange(9), (40, 1)), axis=1)
print(OrderScorer.of(pipeline).makespans(orders).tolist(), simulate(pipeline))
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for disabled in "01"
    ]
    assert outputs[0] == outputs[1] != ""


def test_orders_that_cannot_be_scored() -> None:
    pipeline = chain([stage_operations(4, 4)] * 2, 4)
    for order in ([0, 1, 2, 2], [0, 1, 2], [0, 1, 2, 4]):
        with pytest.raises(ValueError, match="no permutation of 4 microbatches"):
            OrderScorer.of(pipeline).makespans(np.array([[0, 1, 2, 3][: len(order)], order]))
    with pytest.raises(ValueError, match="not all microbatches are joined alike"):
        OrderScorer.of(replace(pipeline, edges=pipeline.edges[:-1]))
    with pytest.raises(PipelineDeadlockError):
        OrderScorer.of(replace(pipeline, edges=np.array([[m, 1 - a, a] for m in range(4) for a in range(2)])))
