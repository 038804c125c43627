"""Operation lists of pipeline stages, and an exact simulator of them.

The joined pipeline of a job is encoder, backbone stages, generator, as far as the job has them. Every data-parallel
rank of every stage is a node that runs a fixed list of forward and backward operations, one at a time. The trainer runs
the lists that are simulated here.
"""

from collections import deque
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
    lists = [stage_operations(n.stage, num_stages, num_microbatches) for n in nodes]
    sources = _sources(nodes, num_microbatches)
    done = [dict[tuple[OperationKind, int], int]() for _ in nodes]
    starts = [np.zeros(2 * num_microbatches, np.int64) for _ in nodes]
    position, clock = [0] * len(nodes), [0] * len(nodes)
    ready = deque(range(len(nodes)))
    while ready:
        n = ready.popleft()
        while position[n] < len(lists[n]):
            operation = lists[n][position[n]]
            forward = operation.kind is OperationKind.FORWARD
            needs = (sources[n] if forward else nodes[n].feeds)[operation.microbatch]
            times = [done[m].get((operation.kind, operation.microbatch)) for m in needs]
            if None in times:
                break
            start = max([clock[n], *(t for t in times if t is not None)])
            duration = (nodes[n].forward_ns if forward else nodes[n].backward_ns)[operation.microbatch]
            starts[n][position[n]], clock[n] = start, start + int(duration)
            done[n][(operation.kind, operation.microbatch)] = clock[n]
            position[n] += 1
            ready.extend((nodes[n].feeds if forward else sources[n])[operation.microbatch])
    stuck = [n for n in range(len(nodes)) if position[n] < len(lists[n])]
    if stuck:
        raise PipelineDeadlockError(f"nodes {stuck[:8]} wait for each other; a plan must not route against the waves")
    busy = tuple(int(n.forward_ns.sum() + n.backward_ns.sum()) for n in nodes)
    return Timeline(max(clock, default=0), tuple(starts), busy)


def _sources(nodes: Sequence[Node], num_microbatches: int) -> list[list[list[int]]]:
    """For each node and microbatch the nodes that feed it."""
    sources: list[list[list[int]]] = [[[] for _ in range(num_microbatches)] for _ in nodes]
    for number, node in enumerate(nodes):
        for microbatch, fed in enumerate(node.feeds):
            for target in fed:
                sources[target][microbatch].append(number)
    return sources
