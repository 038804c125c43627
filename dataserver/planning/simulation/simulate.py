"""An exact event simulation of operation lists.

Every data-parallel rank of every stage is a node that runs a fixed list of operations, one at a time, each as soon as
the node is free and its inputs are there. The trainer runs the lists that are simulated here.
"""

from dataclasses import dataclass

import numpy as np

from dataserver.planning.samples import I64
from dataserver.planning.simulation.graph import OperationGraph, PipelineDeadlockError, build_graph, cell_values
from dataserver.planning.simulation.operations import Operation
from dataserver.planning.simulation.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Timeline:
    """Result of a simulation. Operations stand in the order of their node's list, -1 behind a shorter list."""

    makespan_ns: int
    start_ns: I64
    """int64 [n, operations]: start of each operation of each node."""
    end_ns: I64
    """int64 [n, operations]."""
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
    from dataserver.planning.kernels.operations import run_operations

    graph = build_graph(pipeline)
    shape, listed = graph.cell.shape, graph.cell >= 0
    times = cell_values(pipeline, pipeline.forward_ns, pipeline.backward_ns, pipeline.interaction_ns)
    spread = graph.spread(times)
    flat, cause, _ = run_operations(
        spread, graph.follows, graph.offsets, graph.after, graph.delay_ns, graph.waits.copy()
    )
    durations = spread[: listed.size].reshape(shape)
    start = np.where(listed, flat[: listed.size].reshape(shape), -1)
    stuck = np.flatnonzero((listed & (start < 0)).any(axis=1))
    if len(stuck):
        raise PipelineDeadlockError(
            f"nodes {stuck[:8].tolist()} wait for each other; a plan must not route against the waves"
        )
    through = np.where(cause >= listed.size, cause[cause], cause)[: listed.size]
    end = np.where(listed, start + durations, -1)
    return Timeline(
        makespan_ns=int(end.max(initial=0)),
        start_ns=start,
        end_ns=end,
        busy_ns=durations.sum(axis=1),
        peak_bytes=_peaks(pipeline, graph),
        cause=through.reshape(shape),
    )


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


def _peaks(pipeline: Pipeline, graph: OperationGraph) -> I64:
    """Most activation bytes in flight on each node. int64 [n]."""
    if pipeline.activation_bytes is None or not graph.cell.size:
        return np.zeros(len(pipeline.stage), np.int64)
    shape = len(pipeline.stage), pipeline.num_chunks * pipeline.forward_ns.shape[1]
    held = pipeline.activation_bytes.reshape(shape)
    listed = np.zeros((shape[0], 2 * shape[1] + pipeline.num_batches), np.bool_)
    rows, columns = np.nonzero(graph.cell >= 0)
    listed[rows, graph.cell[rows, columns]] = True
    returned = np.where(listed[:, shape[1] : 2 * shape[1]], held, 0)
    none = np.zeros((shape[0], pipeline.num_batches), np.int64)
    change = graph.spread(np.concatenate([returned, -returned, none], axis=1))
    passing = graph.spread(np.concatenate([held - returned, np.zeros_like(held), none], axis=1))
    change, passing = (values[: graph.cell.size].reshape(graph.cell.shape) for values in (change, passing))
    peaks: I64 = (change.cumsum(axis=1) + passing).max(axis=1)
    return peaks
