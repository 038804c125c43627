"""The pipelined layout."""

from dataserver.planning.expectation import loads
from dataserver.planning.layout import Layout
from dataserver.planning.limits import BackboneLimits
from dataserver.planning.pipelined.alternatives import alternatives
from dataserver.planning.pipelined.planner import bound_ns, plan
from dataserver.planning.pipelined.programs import programs
from dataserver.planning.pipelined.stair import stair
from dataserver.planning.pipelined.timeline import timeline
from dataserver.planning.sequences import empty_percent, fill_percent

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
