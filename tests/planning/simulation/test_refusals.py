"""Pipelines that cannot be: each text in full, with the numbers of the first thing that is wrong."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders.operations import operations_of

from dataserver.planning import I64
from dataserver.planning.simulation import (
    Operation,
    OperationKind,
    OrderScorer,
    Pipeline,
    PipelineDeadlockError,
    chain_edges,
    simulate,
    stage_operations,
)

F, B, I, _, UNSHARD, REDUCE = OperationKind  # noqa: E741
Lists = list[list[Operation]]


def line(lists: Lists, microbatches: int, chunks: int = 1, batches: int = 0, edges: I64 | None = None) -> Pipeline:
    """One node for each list, all times 1; without edges given, a chain."""
    ones = np.ones((len(lists) * chunks, microbatches), np.int64)
    return Pipeline(
        num_stages=len(lists),
        stage=np.arange(len(lists)),
        forward_ns=ones,
        backward_ns=ones,
        edges=chain_edges(len(lists), microbatches, chunks) if edges is None else edges,
        operations=[*map(operations_of, lists)],
        num_chunks=chunks,
        interaction_ns=np.ones((len(lists), batches), np.int64) if batches else None,
    )


NO_EDGES = np.empty((0, 3), np.int64)
FINE = [Operation(F, m, c) for m in range(2) for c in range(2)]


UNKNOWN: list[Any] = [
    (Operation(F, -1), 0, "2 microbatches, 2 chunks and 0 contrastive batches"),
    (Operation(B, 2), 0, "2 microbatches, 2 chunks and 0 contrastive batches"),
    (Operation(F, 0, -1), 0, "2 microbatches, 2 chunks and 0 contrastive batches"),
    (Operation(B, 1, 2), 0, "2 microbatches, 2 chunks and 0 contrastive batches"),
    (Operation(I, 0), 0, "2 microbatches, 2 chunks and 0 contrastive batches"),
    (Operation(I, 1), 1, "2 microbatches, 2 chunks and 1 contrastive batches"),
    (Operation(I, 2), 2, "2 microbatches, 2 chunks and 2 contrastive batches"),
    (Operation(I, -1), 2, "2 microbatches, 2 chunks and 2 contrastive batches"),
    (Operation(I, 0, 2), 2, "2 microbatches, 2 chunks and 2 contrastive batches"),
]


def unknown_operation(wrong: Operation, batches: int, has: str) -> None:
    pipeline = line([[*FINE], [*FINE, wrong]], 2, 2, batches)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        simulate(pipeline)
    assert str(refusal.value) == f"stage 1 lists {wrong}; the pipeline has {has}"


TWICE: list[Any] = [
    ([*FINE, Operation(B, 1, 1), Operation(B, 1, 1)], Operation(B, 1, 1)),
    ([Operation(F, 1, 0), *FINE], Operation(F, 1, 0)),
    ([*FINE, Operation(I, 1), Operation(I, 0), Operation(I, 1)], Operation(I, 1)),
    ([*FINE, Operation(I, 1, 0), Operation(I, 0), Operation(I, 1, 1)], Operation(I, 1)),
]


def listed_twice(listed: list[Operation], twice: Operation) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        simulate(line([FINE, listed], 2, 2, 2, NO_EDGES))
    assert str(refusal.value) == f"stage 1 lists {twice} twice; once is required"


def every_operation_once() -> None:
    back = [Operation(B, m, c) for m in range(2) for c in range(2)]
    interactions = [Operation(I, 0), Operation(I, 1)]
    timeline = simulate(line([[*FINE, *interactions, *back]], 2, 2, 2, NO_EDGES))
    assert timeline.start_ns.tolist() == [list(range(10))]
    assert timeline.cause.tolist()[0][:5] == [-1, 0, 1, 2, 3]


def collectives_are_where_their_list_has_come_to() -> None:
    """On every node one waits for the operation before it in its own list, numbered through all nodes."""
    passes = [Operation(F, 0), Operation(F, 1), Operation(B, 0), Operation(B, 1)]
    both = [[Operation(UNSHARD, 0), *passes, Operation(REDUCE, 0)] for _ in range(2)]
    cause = simulate(line(both, 2)).cause
    assert cause[:, [0, 5]].tolist() == [[-1, 4], [-1, 10]]


BEFORE: list[Any] = [
    ([*FINE[:3], Operation(B, 1, 1), FINE[3]], 1, 1),
    ([Operation(F, 0, 1), Operation(B, 0, 1), Operation(B, 0, 0), Operation(F, 0, 0)], 0, 0),
    ([Operation(F, 0, 0), Operation(B, 1, 0)], 1, 0),
    ([Operation(B, 0, 0), Operation(F, 0, 0)], 0, 0),
]


def backward_first(listed: list[Operation], microbatch: int, chunk: int) -> None:
    with pytest.raises(PipelineDeadlockError) as refusal:
        simulate(line([FINE, listed], 2, 2, 0, NO_EDGES))
    assert str(refusal.value) == (
        f"stage 1 lists the backward of microbatch {microbatch}, chunk {chunk}, without its forward before it"
    )


def passes(kind: OperationKind, *microbatches: int) -> list[Operation]:
    return [Operation(kind, m) for m in microbatches]


BETWEEN: list[Any] = [
    # A forward behind its interaction, at each place of the batch; the other batch's do not matter.
    ([*passes(F, 0), Operation(I, 0), *passes(F, 1)], 0),
    ([*passes(F, 1), Operation(I, 0), *passes(F, 0)], 0),
    ([*passes(F, 0, 1), Operation(I, 0), *passes(F, 2), Operation(I, 1), *passes(F, 3)], 1),
    # A backward before its interaction.
    ([*passes(F, 0, 1), *passes(B, 0), Operation(I, 0), *passes(B, 1)], 0),
    ([*passes(F, 0, 1), *passes(B, 1), Operation(I, 0), *passes(B, 0)], 0),
    ([*passes(F, 0, 1, 2, 3), *passes(B, 3), Operation(I, 1), Operation(I, 0)], 1),
    (None, 0),
    ([*passes(F, 0, 1, 2, 3), Operation(I, 1), *passes(B, 2), Operation(I, 0), *passes(B, 0)], None),
    ([*passes(F, 2, 3), Operation(I, 1), *passes(F, 0, 1), *passes(B, 2, 3)], None),
    ([*passes(F, 0, 1), *passes(B, 0, 1)], None),
    ([Operation(I, 0), *passes(F, 2, 3), Operation(I, 1)], None),
]


def interaction_between(listed: list[Operation] | None, batch: int | None) -> None:
    fine = [*passes(F, 0, 1, 2, 3), Operation(I, 0), Operation(I, 1), *passes(B, 0, 1, 2, 3)]
    listed = [*passes(F, 1), Operation(I, 0), *passes(F, 0)] if listed is None else listed
    pipeline = line([fine, listed], 4, 1, 2, NO_EDGES)
    if batch is None:
        assert simulate(pipeline).makespan_ns > 0
        return
    with pytest.raises(PipelineDeadlockError) as refusal:
        simulate(pipeline)
    assert str(refusal.value) == (
        f"stage 1 lists the interaction of contrastive batch {batch} before one of its forwards or behind one of its "
        f"backwards; it needs all of microbatches {2 * batch} to {2 * batch + 1}"
    )


ENDS: list[Any] = [
    # Forwards: edge 0 -> 1 of microbatch 1; then backwards, whose edges are counted behind all forwards.
    ([[*passes(F, 0)], [*passes(F, 0, 1)], []], (1, 0, 1)),
    ([[*passes(F, 0, 1)], [*passes(F, 0, 1)], [*passes(F, 0, 1), *passes(B, 1)]], None),
    ([[*passes(F, 0, 1)], [*passes(F, 0, 1), *passes(B, 1)], [*passes(F, 0, 1)]], (1, 1, 2)),
]


def ends_differ(lists: Lists, edge: tuple[int, int, int] | None) -> None:
    pipeline = line(lists, 2)
    if edge is None:  # A backward that nobody waits for.
        assert simulate(pipeline).makespan_ns == 5
        return
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        simulate(pipeline)
    assert str(refusal.value) == (
        f"block {edge[1]} feeds block {edge[2]} in microbatch {edge[0]}, but only one of them lists that pass; "
        "both ends of an edge must run it"
    )


def test_every_list_that_cannot_be_is_told_in_full() -> None:
    """In one test, which runs all of the graph: what is wrong and what just is not."""
    for check, cases in (
        (unknown_operation, UNKNOWN),
        (listed_twice, TWICE),
        (backward_first, BEFORE),
        (interaction_between, BETWEEN),
        (ends_differ, ENDS),
    ):
        for case in cases:
            check(*case)
    every_operation_once()
    collectives_are_where_their_list_has_come_to()
    nodes_that_wait()


# --- arrays ---------------------------------------------------------------------------------------------------------

WHOLE = replace(
    line([stage_operations(2, 4), stage_operations(1, 4)], 4),  # type: ignore[list-item]
    transfer_ns=np.zeros(4, np.int64),
    activation_bytes=np.zeros((2, 4), np.int64),
)


SHAPES: list[Any] = [
    ("backward_ns", (2, 3), (2, 4)),
    ("backward_ns", (1, 4), (2, 4)),
    ("edges", (4, 2), (4, 3)),
    ("transfer_ns", (3,), (4,)),
    ("transfer_ns", (5,), (4,)),
    ("interaction_ns", (1, 2), (2, 2)),
    ("activation_bytes", (3, 4), (2, 4)),
    ("activation_bytes", (2, 5), (2, 4)),
]


def wrong_shape(name: str, shape: Any, required: Any) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        replace(WHOLE, **{name: np.zeros(shape, np.int64)}).check()
    assert str(refusal.value) == f"{name} has shape {shape}; 2 nodes of 1 chunks and 4 microbatches require {required}"


COUNTED: list[Any] = ["forward_ns", "backward_ns", "transfer_ns", "interaction_ns", "activation_bytes"]


def negative(name: str) -> None:
    shape = {"transfer_ns": (4,), "interaction_ns": (2, 2)}.get(name, (2, 4))
    values = np.zeros(shape, np.int64)
    replace(WHOLE, **{name: values}).check()
    values.flat[-1] = -1
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        replace(WHOLE, **{name: values}).check()
    assert str(refusal.value) == f"{name} holds -1; nothing may be negative"


RANGES: list[Any] = [
        ({"stage": np.array([0, 2])}, "stages lie in [0, 2]; [0, 2) is required"),
        ({"stage": np.array([-1, 1])}, "stages lie in [-1, 1]; [0, 2) is required"),
        ({"edges": np.array([[0, 0, 1]] * 3 + [[4, 0, 1]])}, "microbatches of edges lie in [0, 4]; [0, 4) is required"),
        ({"edges": np.array([[0, 0, 1]] * 3 + [[-1, 0, 1]])}, "edges holds -1; nothing may be negative"),
        ({"edges": np.array([[0, 0, 1]] * 3 + [[3, 2, 1]])}, "blocks of edges lie in [0, 2]; [0, 2) is required"),
        ({"edges": np.array([[0, 0, 1]] * 3 + [[3, 0, 2]])}, "blocks of edges lie in [0, 2]; [0, 2) is required"),
        ({"operations": [[]]}, "1 operation lists for 2 stages; give each stage one"),
        ({"operations": [[], [], []]}, "3 operation lists for 2 stages; give each stage one"),
        (
            {"interaction_ns": np.ones((2, 3), np.int64)},
            "4 microbatches do not divide into 3 contrastive batches; give every batch the same number",
        ),
    ]  # fmt: skip


def out_of_range(change: dict[str, Any], message: str) -> None:
    WHOLE.check()
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        replace(WHOLE, **change).check()
    assert str(refusal.value) == message


def test_every_array_that_does_not_fit_is_told_in_full() -> None:
    for shape in SHAPES:
        wrong_shape(*shape)
    for name in COUNTED:
        negative(name)
    for change in RANGES:
        out_of_range(*change)
    assert simulate(WHOLE).makespan_ns == 10
    assert (WHOLE.num_batches, replace(WHOLE, interaction_ns=np.zeros((2, 2), np.int64)).num_batches) == (0, 2)
    chains_by_hand()


def chains_by_hand() -> None:
    assert chain_edges(3, 2).tolist() == [[0, 0, 1], [0, 1, 2], [1, 0, 1], [1, 1, 2]]
    # Two stages of two chunks: chunk 0 of both, then chunk 1 of both. Block = 2 x stage + chunk.
    assert chain_edges(2, 1, 2).tolist() == [[0, 0, 2], [0, 2, 1], [0, 1, 3]]
    assert chain_edges(1, 5).shape == (0, 3)


def nodes_that_wait() -> None:
    ring = np.array([[0, a, (a + 1) % 9] for a in range(9)])
    with pytest.raises(PipelineDeadlockError) as refusal:
        simulate(line([passes(F, 0)] * 9, 1, edges=ring))
    assert str(refusal.value) == (
        "nodes [0, 1, 2, 3, 4, 5, 6, 7] wait for each other; a plan must not route against the waves"
    )
    with pytest.raises(PipelineDeadlockError, match=r"nodes \[1, 2\] wait"):
        simulate(line([passes(F, 0)] * 3, 1, edges=np.array([[0, 0, 1], [0, 1, 2], [0, 2, 1]])))


# --- orders ---------------------------------------------------------------------------------------------------------


def test_the_order_that_there_is_takes_what_is_simulated() -> None:
    assert OrderScorer.of(WHOLE).makespans(np.arange(4)[None]).tolist() == [simulate(WHOLE).makespan_ns]


@pytest.mark.parametrize("more", [[[1, 1, 0]], [[0, 0, 1]], [[0, 0, 1], [1, 0, 1], [2, 0, 1], [3, 1, 1]]])
def test_passes_that_are_joined_differently_have_no_scorer(more: list[list[int]]) -> None:
    bare = replace(WHOLE, edges=np.concatenate([WHOLE.edges, more]), transfer_ns=None)
    with pytest.raises(ValueError, match="not all microbatches are joined alike"):
        OrderScorer.of(bare)


@pytest.mark.parametrize("place", range(4))
def test_one_slower_transfer_is_joined_differently_and_all_slower_ones_are_not(place: int) -> None:
    slower = np.zeros(4, np.int64)
    slower[place] = 1
    with pytest.raises(ValueError, match="not all microbatches are joined alike"):
        OrderScorer.of(replace(WHOLE, transfer_ns=slower))
    every = replace(WHOLE, transfer_ns=np.ones(4, np.int64))
    order = OrderScorer.of(every).makespans(np.arange(4)[None])
    assert order.tolist() == [simulate(every).makespan_ns]
