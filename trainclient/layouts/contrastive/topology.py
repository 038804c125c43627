"""The processes of a contrastive job: every tower has its own, and all last stages exchange features."""

from dataserver.planning.job.spec import Execution
from trainclient.topology.process_grid import Topology, edges_of, processes_of_modules


def topology(execution: Execution) -> Topology:
    """The processes of a job; the tensor-parallel leaders of all last stages have a collective."""
    processes, edges = processes_of_modules(execution), edges_of(execution)
    last = tuple(rank for rank, p in enumerate(processes) if p.chunks[-1].is_last and p.tp == 0)
    return Topology(processes, edges, message_edges=edges, collectives=(last,))
