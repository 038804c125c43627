"""The contrastive layout."""

from dataserver.planning.contrastive.alternatives import alternatives
from dataserver.planning.contrastive.limits import TowerLimits
from dataserver.planning.contrastive.planner import plan
from dataserver.planning.contrastive.programs import programs
from dataserver.planning.contrastive.stair import stair
from dataserver.planning.contrastive.timeline import bound_ns, timeline
from dataserver.planning.expectation import loads
from dataserver.planning.layout import Layout

LAYOUT = Layout(
    plan=plan,
    stair=stair,
    programs=programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=TowerLimits,
    alternatives=alternatives,
    figures=lambda _own, _job, _plan: {},
)
