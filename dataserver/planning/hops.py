"""What moves between two modules in a step, and how long each hop of it takes."""

import numpy as np

from dataserver.planning.balancing import bin_loads
from dataserver.planning.costs import hop_ns
from dataserver.planning.job import Execution
from dataserver.planning.plan import Routing
from dataserver.planning.samples import I64


def routed_rows(routing: Routing) -> I64:
    """Rows that one rank sends another in a microbatch, int64 [e]: sorted by microbatch, source rank, target rank.

    As many as there are distinct triples, of a layout whose rows stay in their microbatch.
    """
    ranks = int(max(routing.source_rank.max(initial=0), routing.target_rank.max(initial=0))) + 1
    key = (routing.source_microbatch * ranks + routing.source_rank) * ranks + routing.target_rank
    triples, place = np.unique(key, return_inverse=True)
    return bin_loads(routing.rows, place, len(triples))


def routed_ns(execution: Execution, routing: Routing, peers: I64 | int = 1) -> I64:
    """Nanoseconds of the hops of `routed_rows`, each of whose ends are so many ranks that share the rows evenly.

    Args:
        execution: of the job.
        routing: between two of its modules.
        peers: int64 [e], or the same for all.

    Returns:
        int64 [e].
    """
    transfer = execution.transfer(routing.source_module, routing.target_module)
    return hop_ns(transfer, -(-routed_rows(routing) // peers))
