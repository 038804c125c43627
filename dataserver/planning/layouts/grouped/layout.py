"""The grouped layout."""

from dataserver.planning.layouts.grouped.ablation import stair
from dataserver.planning.layouts.grouped.alternatives import alternatives
from dataserver.planning.layouts.grouped.bounds import bound_ns
from dataserver.planning.layouts.grouped.options import GroupedOptions
from dataserver.planning.layouts.grouped.planner import plan
from dataserver.planning.layouts.grouped.sequences import loads
from dataserver.planning.layouts.grouped.timeline import timeline
from dataserver.planning.layouts.interface import Layout
from dataserver.planning.layouts.shared.limits import BackboneLimits
from dataserver.planning.layouts.shared.sequences import fill_percent
from dataserver.planning.layouts.shared.waves import wave_programs

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
