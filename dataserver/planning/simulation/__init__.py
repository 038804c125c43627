"""Exact simulation of what pipeline stages do.

A layout gives the program of each stage; `simulate` runs any programs and says when everything happens; `OrderScorer`
gives the makespans of many orders of the microbatches under the same programs.
"""

from dataserver.planning.simulation.graph import PipelineDeadlockError
from dataserver.planning.simulation.operations import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    INTERACTION,
    REDUCE,
    UNSHARD,
    Operation,
    OperationKind,
    Operations,
    Program,
    alternating,
    forwards,
    pass_times,
    passes,
    stage_operations,
    whole_step,
)
from dataserver.planning.simulation.orders import OrderScorer, disttrain_order, disttrain_orders
from dataserver.planning.simulation.pipeline import Pipeline, chain_edges, chunk_transfers
from dataserver.planning.simulation.simulate import (
    TimedOperation,
    Timeline,
    critical_path,
    held_bytes,
    makespan_ns,
    peak_bytes,
    simulate,
)

__all__ = [
    "BACKWARD",
    "EXCHANGE",
    "FORWARD",
    "INTERACTION",
    "REDUCE",
    "UNSHARD",
    "Operation",
    "OperationKind",
    "Operations",
    "OrderScorer",
    "Pipeline",
    "PipelineDeadlockError",
    "Program",
    "TimedOperation",
    "Timeline",
    "alternating",
    "chain_edges",
    "chunk_transfers",
    "critical_path",
    "disttrain_order",
    "disttrain_orders",
    "forwards",
    "held_bytes",
    "makespan_ns",
    "pass_times",
    "passes",
    "peak_bytes",
    "simulate",
    "stage_operations",
    "whole_step",
]
