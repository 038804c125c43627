"""Operation lists of pipeline stages, and an exact simulator of them.

The joined pipeline of a job is encoder, backbone stages, generator, as far as the job has them. Every data-parallel
rank of every stage is a node that runs a fixed list of forward and backward operations, one at a time. The trainer runs
the lists that are simulated here.
"""

from collections.abc import Sequence
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


def stage_operations(stage: int, num_stages: int, num_microbatches: int) -> list[Operation]:
    """The 1F1B list of one stage (PipeDream-Flush, Narayanan et al. 2021, section 2.2).

    `num_stages - 1 - stage` forwards (at most `num_microbatches`) fill the pipeline, then forwards and backwards
    alternate, then the remaining backwards drain it. Waves go in order in both directions, so that queues of one wave
    between neighbours never deadlock.
    """
    warmup = min(num_stages - 1 - stage, num_microbatches)
    forward = [Operation(OperationKind.FORWARD, m) for m in range(num_microbatches)]
    backward = [Operation(OperationKind.BACKWARD, m) for m in range(num_microbatches)]
    steady = [op for pair in zip(forward[warmup:], backward, strict=False) for op in pair]
    return forward[:warmup] + steady + backward[num_microbatches - warmup :]


@dataclass(frozen=True, slots=True)
class Node:
    """One data-parallel rank of one stage."""

    stage: int
    forward_ns: I64
    """int64 [microbatches]."""
    backward_ns: I64
    """int64 [microbatches]."""
    feeds: tuple[tuple[int, ...], ...]
    """For each microbatch the nodes that need this node's output, and give back its gradient."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Result of a simulation."""

    makespan_ns: int
    start_ns: tuple[I64, ...]
    """For each node int64 [2 * microbatches]: start of each operation, in the order of its list."""
    busy_ns: tuple[int, ...]
    """For each node the time in which it computes."""

    @property
    def bubble_ppm(self) -> int:
        """Share of node time that is idle, in millionths."""
        total = self.makespan_ns * len(self.busy_ns)
        return 0 if total == 0 else (total - sum(self.busy_ns)) * 1_000_000 // total


class PipelineDeadlockError(RuntimeError):
    """Operation lists that wait for each other."""


def simulate(nodes: Sequence[Node], num_stages: int, num_microbatches: int) -> Timeline:
    """Run the 1F1B lists of all nodes: an operation starts when the node is free and its inputs are there.

    A forward needs the forwards of the nodes that feed it; a backward needs its own forward and the backwards of the
    nodes it feeds. Transfers take no time.

    Raises:
        PipelineDeadlockError: the lists wait for each other.
    """
    from dataserver.planning.kernels.pipeline import run_lists

    if not nodes or not num_microbatches:
        return Timeline(0, tuple(np.zeros(0, np.int64) for _ in nodes), (0,) * len(nodes))
    lists = [stage_operations(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    kinds = np.array([[op.kind is OperationKind.BACKWARD for op in ops] for ops in lists], np.int64)
    microbatches = np.array([[op.microbatch for op in ops] for ops in lists], np.int64)
    stages = [n.stage for n in nodes]
    durations = np.array([[n.forward_ns for n in nodes], [n.backward_ns for n in nodes]], np.int64)
    edges = [(n, m, target) for n, node in enumerate(nodes) for m, fed in enumerate(node.feeds) for target in fed]
    source, microbatch, target = np.array(edges, np.int64).reshape(-1, 3).T
    sources = _grouped(target * num_microbatches + microbatch, source, len(nodes) * num_microbatches)
    targets = _grouped(source * num_microbatches + microbatch, target, len(nodes) * num_microbatches)
    starts = run_lists(kinds[stages], microbatches[stages], durations, *sources, *targets)
    stuck = np.flatnonzero((starts < 0).any(axis=1))
    if len(stuck):
        raise PipelineDeadlockError(
            f"nodes {stuck[:8].tolist()} wait for each other; a plan must not route against the waves"
        )
    busy = durations.sum(axis=(0, 2))
    final = np.array([durations[kinds[s, -1], n, microbatches[s, -1]] for n, s in enumerate(stages)], np.int64)
    makespan = int((starts[:, -1] + final).max())
    return Timeline(makespan, tuple(starts), tuple(int(b) for b in busy))


def _grouped(cell: I64, node: I64, num_cells: int) -> tuple[I64, I64]:
    """The nodes of each cell one after the other, and the offsets of the cells. int64 [e], int64 [num_cells + 1]."""
    order = np.argsort(cell, kind="stable")
    counts = np.bincount(cell, minlength=num_cells)
    return node[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
