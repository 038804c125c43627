"""Where each sequence goes in the backbone: rank, microbatch, slot.

A placement is judged by connected components of ranks: with g the greatest common divisor of the modules' data-parallel
degrees, the ranks fall into g components, each with its share of the encoder, backbone and generator ranks. Components
exchange nothing with each other (as with the communication brokers of DistTrain, section 4.2). One component is a small
pipeline that can be simulated in microseconds.
"""

from dataserver.planning.layouts.pipelined.placing.bounds import lower_bound_ns
from dataserver.planning.layouts.pipelined.placing.parity import with_parity
from dataserver.planning.layouts.pipelined.placing.problem import PlacementProblem, placement_problem
from dataserver.planning.layouts.pipelined.placing.racing import raced
from dataserver.planning.layouts.pipelined.placing.search import (
    NO_GOAL,
    fitted,
    goal_ns,
    makespan_ns,
    searched,
    shortfall_alone,
)
from dataserver.planning.layouts.pipelined.placing.seeds import (
    PADDED_RUNS,
    balanced,
    in_disttrain_order,
    microbatch_sums,
    padded_runs,
    spread_over_waves,
    stratified,
)
from dataserver.planning.plan.placement import Placement

__all__ = [
    "NO_GOAL",
    "PADDED_RUNS",
    "Placement",
    "PlacementProblem",
    "balanced",
    "fitted",
    "goal_ns",
    "in_disttrain_order",
    "lower_bound_ns",
    "makespan_ns",
    "microbatch_sums",
    "padded_runs",
    "placement_problem",
    "raced",
    "searched",
    "shortfall_alone",
    "spread_over_waves",
    "stratified",
    "with_parity",
]
