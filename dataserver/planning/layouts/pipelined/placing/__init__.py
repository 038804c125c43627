"""Where each sequence goes in the backbone: rank, microbatch, slot.

A placement is judged by islands: with g the greatest common divisor of the modules' data-parallel degrees, the ranks
fall into g islands, each with its share of the encoder, backbone and generator ranks, which exchange nothing with each
other (as with the communication brokers of DistTrain, section 4.2). One island is a small pipeline that can be
simulated in microseconds.
"""

from dataserver.planning.layouts.pipelined.placing.bounds import lower_bound_ns
from dataserver.planning.layouts.pipelined.placing.parity import with_parity
from dataserver.planning.layouts.pipelined.placing.problem import PlacementProblem, placement_problem
from dataserver.planning.layouts.pipelined.placing.search import (
    NO_GOAL,
    fitted,
    goal_ns,
    lacking_alone,
    makespan_ns,
    searched,
)
from dataserver.planning.layouts.pipelined.placing.seeds import (
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
    "Placement",
    "PlacementProblem",
    "balanced",
    "fitted",
    "goal_ns",
    "in_disttrain_order",
    "lacking_alone",
    "lower_bound_ns",
    "makespan_ns",
    "microbatch_sums",
    "padded_runs",
    "placement_problem",
    "searched",
    "spread_over_waves",
    "stratified",
    "with_parity",
]
