"""The grouped layout."""

from dataserver.planning.grouped.alternatives import alternatives
from dataserver.planning.grouped.bounds import bound_ns
from dataserver.planning.grouped.options import GroupedOptions
from dataserver.planning.grouped.planner import plan
from dataserver.planning.grouped.sequences import loads
from dataserver.planning.grouped.stair import stair
from dataserver.planning.grouped.timeline import timeline
from dataserver.planning.layout import Layout
from dataserver.planning.limits import BackboneLimits
from dataserver.planning.sequences import fill_percent
from dataserver.planning.waves import wave_programs

REMEDY = "raise layout.max_degree, lower stream.seq_len"

LAYOUT = Layout(
    plan=plan,
    stair=stair,
    programs=wave_programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=lambda spec: BackboneLimits(spec, degree=spec.execution.options(GroupedOptions).max_degree, remedy=REMEDY),
    alternatives=alternatives,
    figures=lambda _own, job, plan: fill_percent(job, plan),
)
