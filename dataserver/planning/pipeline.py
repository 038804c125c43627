"""Operation lists of pipeline stages, and an exact simulator of them.

The joined pipeline of a job is encoder, backbone stages, generator, as far as the job has them. Every data-parallel
rank of every stage is a node that runs a fixed list of forward and backward operations, one at a time. The trainer runs
the lists that are simulated here.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dataserver.planning.samples import I64


class OperationKind(StrEnum):
    """Directions."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Operation:
    """One forward or backward pass of one microbatch."""

    kind: OperationKind
    microbatch: int


def stage_operations(stage: int, num_stages: int, num_microbatches: int, extra_in_flight: int = 0) -> list[Operation]:
    """The 1F1B list of one stage (PipeDream-Flush, Narayanan et al. 2021, section 2.2).

    `num_stages - 1 - stage + extra_in_flight` forwards (at most `num_microbatches`) fill the pipeline, then forwards
    and backwards alternate, then the remaining backwards drain it. More in flight smooths over microbatches of unequal
    size and costs their activations. Waves go in order in both directions, so that queues of one wave between
    neighbours never deadlock.
    """
    warmup = min(num_stages - 1 - stage + extra_in_flight, num_microbatches)
    forward = [Operation(OperationKind.FORWARD, m) for m in range(num_microbatches)]
    backward = [Operation(OperationKind.BACKWARD, m) for m in range(num_microbatches)]
    steady = [op for pair in zip(forward[warmup:], backward, strict=False) for op in pair]
    return forward[:warmup] + steady + backward[num_microbatches - warmup :]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A joined pipeline: n nodes, each one data-parallel rank of one stage, and who feeds whom."""

    num_stages: int
    stage: I64
    """int64 [n]: the stage of each node."""
    forward_ns: I64
    """int64 [n, microbatches]."""
    backward_ns: I64
    """int64 [n, microbatches]."""
    edges: I64
    """int64 [e, 3]: in this microbatch the target needs the source's output and gives its gradient back."""
    extra_in_flight: int = 0
    """See `stage_operations`."""

    @property
    def lists(self) -> list[list[Operation]]:
        """The operations of each stage."""
        count = self.forward_ns.shape[1]
        return [stage_operations(s, self.num_stages, count, self.extra_in_flight) for s in range(self.num_stages)]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Result of a simulation."""

    makespan_ns: int
    start_ns: I64
    """int64 [n, 2 * microbatches]: start of each operation of each node, in the order of its list."""
    busy_ns: I64
    """int64 [n]: time in which each node computes."""

    @property
    def bubble_ppm(self) -> int:
        """Share of node time that is idle, in millionths."""
        total = self.makespan_ns * len(self.busy_ns)
        return 0 if total == 0 else (total - int(self.busy_ns.sum())) * 1_000_000 // total


class PipelineDeadlockError(RuntimeError):
    """Operation lists that wait for each other."""


def simulate(pipeline: Pipeline) -> Timeline:
    """Run the 1F1B lists of all nodes: an operation starts when the node is free and its inputs are there.

    A forward needs the forwards of the nodes that feed it; a backward needs its own forward and the backwards of the
    nodes it feeds. Transfers take no time.

    Raises:
        PipelineDeadlockError: the lists wait for each other.
    """
    from dataserver.planning.kernels.pipeline import run_lists

    num_nodes, num_microbatches = pipeline.forward_ns.shape
    durations = np.stack([pipeline.forward_ns, pipeline.backward_ns])
    busy = durations.sum(axis=(0, 2))
    if not num_nodes or not num_microbatches:
        return Timeline(0, np.zeros((num_nodes, 0), np.int64), busy)
    lists = pipeline.lists
    kinds = np.array([[op.kind is OperationKind.BACKWARD for op in ops] for ops in lists], np.int64)[pipeline.stage]
    microbatches = np.array([[op.microbatch for op in ops] for ops in lists], np.int64)[pipeline.stage]
    microbatch, source, target = pipeline.edges.T
    sources = _grouped(target * num_microbatches + microbatch, source, num_nodes * num_microbatches)
    targets = _grouped(source * num_microbatches + microbatch, target, num_nodes * num_microbatches)
    start = run_lists(kinds, microbatches, durations, *sources, *targets)
    stuck = np.flatnonzero((start < 0).any(axis=1))
    if len(stuck):
        raise PipelineDeadlockError(
            f"nodes {stuck[:8].tolist()} wait for each other; a plan must not route against the waves"
        )
    final = durations[kinds[:, -1], np.arange(num_nodes), microbatches[:, -1]]
    return Timeline(int((start[:, -1] + final).max()), start, busy)


def _grouped(cell: I64, node: I64, num_cells: int) -> tuple[I64, I64]:
    """The nodes of each cell one after the other, and the offsets of the cells. int64 [e], int64 [num_cells + 1]."""
    order = np.argsort(cell, kind="stable")
    counts = np.bincount(cell, minlength=num_cells)
    return node[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
