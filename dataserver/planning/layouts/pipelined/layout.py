"""The pipelined layout."""

from dataserver.planning.layouts.interface import Layout
from dataserver.planning.layouts.pipelined.ablation import stair
from dataserver.planning.layouts.pipelined.alternatives import alternatives
from dataserver.planning.layouts.pipelined.planner import bound_ns, plan
from dataserver.planning.layouts.pipelined.programs import programs
from dataserver.planning.layouts.pipelined.timeline import timeline
from dataserver.planning.layouts.shared.limits import BackboneLimits
from dataserver.planning.layouts.shared.sequences import empty_percent, fill_percent
from dataserver.planning.plan.expectation import loads

LAYOUT = Layout(
    plan=plan,
    stair=stair,
    programs=programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=BackboneLimits,
    alternatives=alternatives,
    figures=lambda _own, job, plan: fill_percent(job, plan) | empty_percent(job, plan),
)
