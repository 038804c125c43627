"""Small pipelines for the simulator, node by node."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from builders.operations import operations_of

from dataserver.planning import I64
from dataserver.planning.layouts.shared.waves import one_f_one_b_in_flight
from dataserver.planning.simulation import (
    Operation,
    Pipeline,
    Timeline,
    chain_edges,
    simulate,
    stage_operations,
)


class Node(NamedTuple):
    """A node, with the nodes that it feeds in each microbatch."""

    stage: int
    forward_ns: I64
    backward_ns: I64
    feeds: tuple[tuple[int, ...], ...]


def build(nodes: Sequence[Node], stages: int, microbatches: int, extra: int = 0) -> Pipeline:
    edges = [(m, n, fed) for n, node in enumerate(nodes) for m, targets in enumerate(node.feeds) for fed in targets]
    return Pipeline(
        num_stages=stages,
        stage=np.array([n.stage for n in nodes], np.int64),
        forward_ns=np.array([n.forward_ns for n in nodes], np.int64).reshape(len(nodes), microbatches),
        backward_ns=np.array([n.backward_ns for n in nodes], np.int64).reshape(len(nodes), microbatches),
        edges=np.array(edges, np.int64).reshape(-1, 3),
        operations=[stage_operations(n, microbatches) for n in one_f_one_b_in_flight(stages, extra).tolist()],
    )


def run(nodes: Sequence[Node], stages: int, microbatches: int, extra: int = 0) -> Timeline:
    return simulate(build(nodes, stages, microbatches, extra))


def chain(forward: Sequence[Sequence[int]], backward: Sequence[Sequence[int]]) -> tuple[list[Node], int, int]:
    """A pipeline of one node for each stage; times by stage and microbatch."""
    stages, microbatches = len(forward), len(forward[0])
    nodes = [
        Node(s, np.array(forward[s]), np.array(backward[s]), (((s + 1,) if s + 1 < stages else ()),) * microbatches)
        for s in range(stages)
    ]
    return nodes, stages, microbatches


def equal_chain(
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
        operations=[*map(operations_of, lists)],
        num_chunks=chunks,
        interaction_ns=spent if interaction else None,
        activation_bytes=np.ones(shape, np.int64),
    )


def spelled(operations: Sequence[Operation]) -> str:
    return " ".join(f"{o.kind[0]}{o.microbatch}{'abcdefgh'[o.chunk] if o.chunk else ''}" for o in operations)


def shares(timeline: Timeline, idle: Fraction) -> None:
    assert timeline.bubble_ppm == int(idle * 1_000_000)
