"""When the receives of rows are posted: as soon as their source may send.

By its own list, a source sends rows once it has taken certain gradients; so the receive is posted when these have been
sent. The rows then move while something else is computed, and what waits for rows is bounded by the numbers in flight.
Receives of gradients are posted as soon as the rows have been sent.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from dataserver.planning.simulation import BACKWARD, FORWARD
from trainclient.program.listing import StepPrograms
from trainclient.topology.places import Place, Topology

AHEAD = 2
"""Microbatches whose rows are waited for beside the one that runs, where no gradients return: nothing else bounds how
far such a source runs ahead."""


@dataclass(frozen=True, slots=True)
class Posting:
    """A receive of rows that is posted before an operation."""

    chunk: int
    """Position among the chunks of the process."""
    way: int
    """Position among the ways into the chunk."""
    microbatch: int


def postings(programs: StepPrograms, topology: Topology, place: Place) -> tuple[tuple[Posting, ...], ...]:
    """What a process posts before each of its operations in a step: nothing where rows cross by collectives."""
    operations = programs.of_place(place).operations
    found: defaultdict[int, list[Posting]] = defaultdict(list)
    for chunk, held in enumerate(() if topology.colocated else place.chunks):
        mine = operations.chunk == chunk
        forward, backward = (np.flatnonzero(mine & (operations.kind == kind)) for kind in (FORWARD, BACKWARD))
        for number, way in enumerate(topology.into(held)):
            if way.returns:
                done, after = backward, programs.taken(way)
            else:
                done, after = forward, np.arange(programs.num_microbatches) - AHEAD - 1
            due = np.where(after < 0, 0, done[np.maximum(after, 0)] + 1)
            for microbatch, index in enumerate(due.tolist()):
                found[index].append(Posting(chunk, number, microbatch))
    return tuple(tuple(found[index]) for index in range(len(operations)))
