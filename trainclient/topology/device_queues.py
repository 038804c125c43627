"""How many queues a device needs, so that no transfer stands behind another one that waits for a third process."""

from collections.abc import Iterable, Mapping
from typing import Final

from trainclient.topology.process_grid import Topology
from trainclient.topology.support import TopologyError

QUEUES: Final = 32
"""The most that a device has for one process, and streams of torch."""
VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Says how many of them a process uses. The trainer sets it to `QUEUES` where it is not set."""
COMPUTATION: Final = 5
"""Queues of what is computed: one, and those that FSDP2 gathers, copies and sums in."""


def row_members(pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Global ranks of the processes that send rows to others, or receive them, along an edge of such pairs."""
    return sorted({rank for pair in pairs if pair[0] != pair[1] for rank in pair})


def communicators_of(topology: Topology, tied: Iterable[tuple[int, int]] = ()) -> list[int]:
    """How many communicators each process has, by its global rank.

    Args:
        topology: of all processes.
        tied: global ranks of the two processes of each tied parameter that both hold.
    """
    found = [1] * topology.world_size  # of all processes
    for stage in topology.stages:
        for row in stage:
            for rank in row:
                found[rank] += 1 + (len(row) > 1)  # of data-parallel ranks, and of tensor-parallel ones
    for members in (*(group.members for group in topology.sequence_groups), *topology.collectives):
        for rank in members if len(members) < topology.world_size else ():
            found[rank] += 1
    for edge in topology.message_edges:
        for rank in row_members(topology.pairs(edge)):
            found[rank] += 1 + edge.returns
    for rank in (rank for pair in tied for rank in pair):
        found[rank] += 1
    return found


def require_queues(topology: Topology, environment: Mapping[str, str], tied: Iterable[tuple[int, int]] = ()) -> None:
    """Raise TopologyError where rows move by messages and communicators of a process would share queues.

    A transfer that waits for another process keeps its queue, and what stands behind it may be what that one waits for.
    Arguments are as of `communicators_of`, beside the environment of the process.
    """
    if not topology.message_edges:
        return
    found = communicators_of(topology, tied)
    most = max(range(topology.world_size), key=found.__getitem__)
    needed = found[most] + COMPUTATION
    chosen = environment.get(VARIABLE, str(QUEUES))
    available = min(QUEUES, int(chosen)) if chosen.isdigit() else 0
    if needed <= available:
        return
    if needed <= QUEUES:
        raise TopologyError(
            f"{VARIABLE} is {chosen}; processes of this job need {needed} queues, or transfers could wait for each "
            f"other in a circle: unset it, or set it to {QUEUES}"
        )
    raise TopologyError(
        f"{topology.processes[most]} has {needed - COMPUTATION} communicators, and needs {needed} queues; a device has "
        f"{QUEUES}: set layout.chunks lower"
    )
