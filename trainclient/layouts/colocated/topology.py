"""The processes of a colocated job: each runs all modules, one phase after the other."""

from itertools import product

from dataserver.planning.job.spec import Execution
from trainclient.topology.process_grid import GridProcess, Topology, chunks_of, edges_of
from trainclient.topology.support import unsplit_sequences


def topology(execution: Execution) -> Topology:
    """The processes of a job; rows move by collectives, each between the processes with the same tensor-parallel rank.

    Raises:
        TopologyError: sequences are to be split.
    """
    backbone, chunks = execution.backbone, chunks_of(execution)
    if backbone.sp > 1:
        raise unsplit_sequences(backbone)
    held = tuple(chunk for module in execution.by_depth for chunk in chunks[module.name])
    degrees = product(range(backbone.dp), range(backbone.tp))
    processes = tuple(GridProcess(held, rank, 0, tp) for rank, tp in degrees)
    ranks = tuple(range(len(processes)))
    return Topology(
        processes,
        edges_of(execution),
        collectives=tuple(ranks[tp :: backbone.tp] for tp in range(backbone.tp)),
        plan_checked_ranks=ranks,
    )
