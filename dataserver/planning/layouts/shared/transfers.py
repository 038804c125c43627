"""What moves between two modules in a step, and how long each transfer of it takes."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.balancing import bin_loads
from dataserver.planning.costs.model import transfer_ns
from dataserver.planning.job.spec import Execution
from dataserver.planning.plan.plan import Routing


def routed_ns(execution: Execution, routing: Routing, peers: I64 | int = 1) -> I64:
    """Nanoseconds of what one rank sends another in a microbatch. int64 [e], as many as there are distinct triples.

    They are sorted by microbatch, source rank, target rank. Rows stay in their microbatch in such a layout.

    Args:
        execution: of the job.
        routing: between two of its modules.
        peers: int64 [e], ranks that share the rows evenly at each transfer's ends, or the same for all.
    """
    ranks = int(max(routing.source_rank.max(initial=0), routing.target_rank.max(initial=0))) + 1
    key = (routing.source_microbatch * ranks + routing.source_rank) * ranks + routing.target_rank
    triples, place = np.unique(key, return_inverse=True)
    rows = bin_loads(routing.rows, place, len(triples))
    return transfer_ns(execution.transfer(routing.source_module, routing.target_module), -(-rows // peers))
