"""The processes of a grouped job: ranks of the backbone share sequences, in groups that change."""

from dataserver.planning.job.spec import Execution
from trainclient.topology.process_grid import SequenceGroup, Topology, edges_of, processes_of_modules


def topology(execution: Execution) -> Topology:
    """The processes of a job; those of the backbone run each pass together, and may share sequences."""
    processes, edges = processes_of_modules(execution), edges_of(execution)
    backbone = tuple(rank for rank, process in enumerate(processes) if process.chunks[0].module.holds_samples)
    degrees = [degree for degree in execution.layout.group_degrees if degree > 1]
    runs = [range(first, first + degree) for degree in degrees for first in range(0, len(backbone), degree)]
    return Topology(
        processes,
        edges,
        message_edges=edges,
        plan_checked_ranks=backbone,
        lockstep_ranks=backbone,
        changing_groups=tuple(SequenceGroup(tuple(run), tuple(backbone[rank] for rank in run)) for run in runs),
    )
