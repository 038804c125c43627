"""The makespan of operation lists, without a graph of their operations."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64
from dataserver.planning.kernels.compiler import inlined_part, kernel

STUCK = -1
"""What `makespan_of_lists` finds where operations wait for each other, or for what no list has."""


class Lists(NamedTuple):
    """Forwards and backwards of every stage, one list behind the other, and the s stages of n nodes."""

    kind: I64
    """int64 [ops]: 0 for a forward, 1 for a backward; others take no time and keep nobody waiting."""
    cell: I64
    """int64 [ops]: chunk * microbatches + microbatch."""
    first: I64
    """int64 [s + 1]: where the list of each stage begins."""
    stage: I64
    """int64 [n]: of each node."""


class Edges(NamedTuple):
    """Who feeds whom, see `simulation.Pipeline`. int64 [e] each; an edge may be there several times."""

    microbatch: I64
    source: I64
    target: I64
    delay: I64


def makespan_of_lists(lists: Lists, forward: I64, backward: I64, edges: Edges) -> int:
    """When the last node is done: each runs its list, one operation as soon as the one before and its inputs are there.

    Args:
        lists: of all stages. None lists a pass twice.
        forward: int64 [blocks, microbatches], nanoseconds.
        backward: the same.
        edges: between blocks.

    Returns:
        Nanoseconds, or `STUCK`.
    """
    passes, nodes = forward.size, len(lists.stage)
    inputs = np.zeros((2, passes + 1), np.int64)  # edges into each forward, and into each backward
    sorted_edges = np.empty((2, len(edges.delay)), np.int64)
    ends, state = np.full((2, passes), -1, np.int64), np.zeros((2, nodes), np.int64)
    return int(_makespan(lists, forward, backward, edges, inputs, sorted_edges, ends, state))


@kernel
def _makespan(
    lists: Lists, forward: I64, backward: I64, edges: Edges, inputs: I64, sorted_edges: I64, ends: I64, state: I64
) -> int:
    """`ends`: int64 [2, blocks * microbatches], -1 for what was not run. `state`: of each node the clock, and how many
    of its operations were run."""
    microbatches, nodes = forward.shape[1], state.shape[1]
    width = len(forward) // max(nodes, 1) * microbatches  # passes of a node
    _sort_edges(edges.microbatch, edges.target, microbatches, inputs[0], sorted_edges[0])
    _sort_edges(edges.microbatch, edges.source, microbatches, inputs[1], sorted_edges[1])
    left, before = 0, -1
    for node in range(nodes):
        state[1, node] = lists.first[lists.stage[node]]
        left += lists.first[lists.stage[node] + 1] - state[1, node]
    while left > 0 and left != before:  # towards the last stage forwards follow each other, and back backwards
        before = left
        for visit in range(2 * nodes):
            node = visit if visit < nodes else 2 * nodes - 1 - visit
            last, clock = lists.first[lists.stage[node] + 1], state[0, node]
            at = state[1, node]
            while at < last:
                kind, here = lists.kind[at], node * width + lists.cell[at]
                if kind > 1:
                    at += 1
                    continue
                ready = 0
                for i in range(inputs[kind, here], inputs[kind, here + 1]):
                    edge = sorted_edges[kind, i]
                    other = edges.source[edge] if kind == 0 else edges.target[edge]
                    end = ends[kind, other * microbatches + edges.microbatch[edge]]
                    if end < 0:
                        ready = -1
                        break
                    ready = max(ready, end + edges.delay[edge])
                if ready < 0 or (kind == 1 and ends[0, here] < 0):
                    break
                block, wave = here // microbatches, here % microbatches
                clock = max(clock, ready) + (forward[block, wave] if kind == 0 else backward[block, wave])
                ends[kind, here] = clock
                at += 1
            left -= at - state[1, node]
            state[0, node], state[1, node] = clock, at
    latest = 0
    for node in range(nodes):
        latest = max(latest, state[0, node])
    return -1 if left else latest


@inlined_part
def _sort_edges(microbatch: I64, block: I64, microbatches: int, first: I64, order: I64) -> None:
    """The edges by the pass at one of their ends: those of pass p are order[first[p] : first[p + 1]]."""
    for i in range(len(block)):
        first[block[i] * microbatches + microbatch[i]] += 1
    total = 0
    for p in range(len(first)):
        total += first[p]
        first[p] = total
    for i in range(len(block) - 1, -1, -1):
        p = block[i] * microbatches + microbatch[i]
        first[p] -= 1
        order[first[p]] = i
