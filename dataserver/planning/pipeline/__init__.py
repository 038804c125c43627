"""Operation lists of pipeline stages, and exact simulation of them.

The joined pipeline of a job is encoder, backbone stages, generator, as far as the job has them. Generators give the
list of operations of each stage; `simulate` runs any lists and says when everything happens; `OrderScorer` gives the
makespans of many orders of the microbatches under the same lists.
"""

from dataserver.planning.pipeline.graph import PipelineDeadlockError
from dataserver.planning.pipeline.layout import Pipeline, chain_edges, chunk_hops
from dataserver.planning.pipeline.operations import (
    Operation,
    OperationKind,
    batch_sync_operations,
    distmm_operations,
    gpipe_in_flight,
    interleaved_in_flight,
    interleaved_operations,
    one_f_one_b_in_flight,
    stage_operations,
)
from dataserver.planning.pipeline.orders import OrderScorer, OrderTimes
from dataserver.planning.pipeline.simulation import TimedOperation, Timeline, critical_path, simulate

__all__ = [
    "Operation",
    "OperationKind",
    "OrderScorer",
    "OrderTimes",
    "Pipeline",
    "PipelineDeadlockError",
    "TimedOperation",
    "Timeline",
    "batch_sync_operations",
    "chain_edges",
    "chunk_hops",
    "critical_path",
    "distmm_operations",
    "gpipe_in_flight",
    "interleaved_in_flight",
    "interleaved_operations",
    "one_f_one_b_in_flight",
    "simulate",
    "stage_operations",
]
