"""An exact event simulation of operation lists.

Every data-parallel rank of every stage is a node that runs a fixed list of operations, one at a time, each as soon as
the node is free and its inputs are there. The trainer runs the lists that are simulated here.
"""

from dataclasses import dataclass, replace

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.simulation.graph import PipelineDeadlockError, build_graph, cell_values
from dataserver.planning.simulation.operations import BACKWARD, EXCHANGE, FORWARD, Operation, Operations
from dataserver.planning.simulation.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Timeline:
    """Result of a simulation. Operations are in the order of their node's list, -1 after a shorter list."""

    makespan_ns: int
    start_ns: I64
    """int64 [n, operations]: start of each operation of each node."""
    end_ns: I64
    """int64 [n, operations]: end of each operation of each node."""
    busy_ns: I64
    """int64 [n]: time in which each node computes."""
    peak_bytes: I64
    """int64 [n]: most activation memory that the node holds at once. The list alone decides it, not the times."""
    cause: I64
    """int64 [n, operations]: the operation that each waited for last, as node * operations + position; -1 for none."""

    @property
    def bubble_ppm(self) -> int:
        """Share of node time that is idle, in millionths."""
        total = self.makespan_ns * len(self.busy_ns)
        return 0 if total == 0 else (total - int(self.busy_ns.sum())) * 1_000_000 // total


@dataclass(frozen=True, slots=True)
class TimedOperation:
    """One operation of one node and when it runs."""

    node: int
    operation: Operation
    start_ns: int
    end_ns: int


def simulate(pipeline: Pipeline) -> Timeline:
    """Run the lists of all nodes: an operation starts when the node is free and its inputs are there.

    A forward needs the forwards of the blocks that feed it; a backward needs its own forward and the backwards of the
    blocks it feeds; an interaction needs all forwards of its batch on every node that lists it, and comes before all
    backwards of its batch there.

    Raises:
        ValueError: the pipeline's arrays do not fit each other, or an operation is missing, unknown or listed twice.
        PipelineDeadlockError: the lists wait for each other.
    """
    start, end, durations, cause = _run(pipeline)
    computed = Timeline(
        makespan_ns=int(end.max(initial=0)),
        start_ns=start,
        end_ns=end,
        busy_ns=durations.sum(axis=1),
        peak_bytes=peak_bytes(pipeline),
        cause=cause,
    )
    return _with_collectives(pipeline, computed)


def makespan_ns(pipeline: Pipeline) -> int:
    """The makespan that `simulate` finds, without its timeline.

    Raises:
        ValueError, PipelineDeadlockError: see there.
    """
    found = None if pipeline.num_batches else _swept_ns(pipeline)
    return int(_run(pipeline)[1].max(initial=0)) if found is None else found


def _swept_ns(pipeline: Pipeline) -> int | None:
    """The makespan without a graph, which takes a fifth of the time; None where some operation is never run."""
    from dataserver.planning.kernels.lists import STUCK, Edges, Lists, makespan_of_lists

    yield_point()
    joined, first = Operations.joined(pipeline.operations), np.cumsum([0, *map(len, pipeline.operations)])
    microbatch, source, target = pipeline.edges.T
    cell = joined.chunk * pipeline.forward_ns.shape[1] + joined.microbatch
    found = makespan_of_lists(
        Lists(joined.kind, cell, first, pipeline.stage),
        pipeline.forward_ns,
        pipeline.backward_ns,
        Edges(microbatch, source, target, pipeline.delay_ns),
    )
    return None if found == STUCK else found


def _run(pipeline: Pipeline) -> tuple[I64, I64, I64, I64]:
    """Start, end, duration and cause (see `Timeline`) of all that computes, int64 [n, operations] each."""
    from dataserver.planning.kernels.operations import run_operations

    yield_point()
    graph = build_graph(pipeline)
    yield_point()
    shape, listed = graph.cell.shape, graph.cell >= 0
    times = cell_values(pipeline, pipeline.forward_ns, pipeline.backward_ns, pipeline.interaction_ns)
    spread = graph.spread(times)
    yield_point()
    flat, cause, _ = run_operations(
        spread, graph.follows, graph.offsets, graph.after, graph.delay_ns, graph.waits.copy()
    )
    yield_point()
    durations = spread[: listed.size].reshape(shape)
    start = np.where(listed, flat[: listed.size].reshape(shape), -1)
    stuck = np.flatnonzero((listed & (start < 0)).any(axis=1))
    if len(stuck):
        raise PipelineDeadlockError(
            f"nodes {stuck[:8].tolist()} wait for each other; a plan must not route against the waves"
        )
    through = np.where(cause >= listed.size, cause[cause], cause)[: listed.size]
    end = np.where(listed, start + durations, -1)
    yield_point()
    return start, end, durations, through.reshape(shape)


def _with_collectives(pipeline: Pipeline, computed: Timeline) -> Timeline:
    """The timeline of whole lists, from that of what they compute: each collective is where the list has come to."""
    lists = pipeline.operations
    if all(len(listed.computing) == len(listed) for listed in lists):
        return computed
    nodes, width = computed.start_ns.shape
    length = max(len(listed) for listed in lists)
    start, end, cause = np.full((3, nodes, length), -1, np.int64)
    place = np.zeros((nodes, width), np.int64)  # in whole lists, of what is computed
    for stage, listed in enumerate(lists):
        here, computes = np.flatnonzero(pipeline.stage == stage), listed.kind < EXCHANGE
        before = computes.cumsum() - 1
        done = np.concatenate([np.zeros((len(here), 1), np.int64), computed.end_ns[here]], axis=1)[:, before + 1]
        began = np.concatenate([computed.start_ns[here], done[:, :1]], axis=1)[:, before]
        start[here, : len(listed)] = np.where(computes, began, done)
        end[here, : len(listed)] = done
        cause[here, : len(listed)] = here[:, None] * length + np.arange(-1, len(listed) - 1)
        place[here, : computes.sum()] = here[:, None] * length + np.flatnonzero(computes)
    cause[:, 0] = -1
    listed_ns = computed.start_ns >= 0
    waited = computed.cause[listed_ns]
    cause.flat[place[listed_ns]] = np.where(waited >= 0, place.flat[np.maximum(waited, 0)], -1)
    return replace(computed, start_ns=start, end_ns=end, cause=cause)


def critical_path(pipeline: Pipeline, timeline: Timeline) -> list[TimedOperation]:
    """Operations that make the step as long as it is, in their order.

    Each starts when the one before it ends, or when its transfer arrives: the durations and transfers on the path add
    up to the makespan. Shortening anything else helps nothing. Of several such paths one is given, always the same.
    """
    path: list[TimedOperation] = []
    length, lists = timeline.start_ns.shape[1], pipeline.operations
    number = int(timeline.end_ns.argmax()) if timeline.end_ns.size else -1
    while number >= 0:
        node, position = divmod(number, length)
        span = int(timeline.start_ns[node, position]), int(timeline.end_ns[node, position])
        path.append(TimedOperation(node, lists[int(pipeline.stage[node])][position], *span))
        number = int(timeline.cause[node, position])
    return path[::-1]


def peak_bytes(pipeline: Pipeline) -> I64:
    """Most activation bytes in flight on each node. int64 [n]."""
    peaks, held = np.zeros(len(pipeline.stage), np.int64), pipeline.activation_bytes
    if held is not None:
        held = held.reshape(len(peaks), pipeline.num_chunks, held.shape[1])
        for stage, operations in enumerate(pipeline.operations):
            here = pipeline.stage == stage
            peaks[here] = held_bytes(operations, held[here]).max(axis=1, initial=0)
    return peaks


def held_bytes(operations: Operations, held: I64) -> I64:
    """Bytes that nodes of one list hold in each of its operations. int64 [n, operations].

    Args:
        operations: the list.
        held: int64 [n, chunks, microbatches], from a forward to its backward; without one until the forward ends.
    """
    chunk, microbatch = operations.chunk, operations.microbatch
    forward, backward = operations.kind == FORWARD, operations.kind == BACKWARD
    returned = np.zeros(held.shape[1:], np.bool_)
    returned[chunk[backward], microbatch[backward]] = True
    kept, mine = returned[chunk, microbatch], held[:, chunk, microbatch]
    during: I64 = (mine * (forward & kept) - mine * backward).cumsum(axis=1) + mine * (forward & ~kept)
    return during
