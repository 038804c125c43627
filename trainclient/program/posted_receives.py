"""Decides when receives of rows are posted: as soon as their source may send.

By its own list, a source sends rows once it has taken certain gradients; so the receive is posted when these have been
sent. The rows then move while something else is computed, and what waits for rows is bounded by the numbers in flight.
Receives of gradients are posted as soon as the rows have been sent.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from dataserver.planning.simulation import BACKWARD, FORWARD
from trainclient.program.step_programs import StepPrograms
from trainclient.topology.process_grid import GridProcess, Topology

AHEAD = 2
"""Microbatches whose rows are waited for beside the one that runs, where no gradients return: nothing else bounds how
far such a source runs ahead."""


@dataclass(frozen=True, slots=True)
class PostedReceive:
    """A receive of rows that is posted before an operation."""

    chunk: int
    """Position among the chunks of the process."""
    edge: int
    """Position among the edges into the chunk."""
    microbatch: int


def posted_receives(
    programs: StepPrograms, topology: Topology, process: GridProcess
) -> tuple[tuple[PostedReceive, ...], ...]:
    """What a process posts before each of its operations in a step: nothing where rows move by collectives."""
    operations = programs.of_process(process).operations
    found: defaultdict[int, list[PostedReceive]] = defaultdict(list)
    for chunk, held in enumerate(process.chunks):
        mine = operations.chunk == chunk
        forward, backward = (np.flatnonzero(mine & (operations.kind == kind)) for kind in (FORWARD, BACKWARD))
        for number, edge in enumerate(topology.into(held)):
            if edge not in topology.message_edges:
                continue
            if edge.returns:
                done, after = backward, programs.taken(edge)
            else:
                done, after = forward, np.arange(programs.num_microbatches) - AHEAD - 1
            due = np.where(after < 0, 0, done[np.maximum(after, 0)] + 1)
            for microbatch, index in enumerate(due.tolist()):
                found[index].append(PostedReceive(chunk, number, microbatch))
    return tuple(tuple(found[index]) for index in range(len(operations)))
