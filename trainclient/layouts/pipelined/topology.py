"""The processes of a pipelined job: every module has its own, and rows move from stage to stage."""

from dataserver.planning.job.spec import Execution
from trainclient.topology.process_grid import Topology, edges_of, processes_of_modules


def topology(execution: Execution) -> Topology:
    """The processes of a job; rows move by messages along all edges."""
    edges = edges_of(execution)
    return Topology(processes_of_modules(execution), edges, message_edges=edges)
