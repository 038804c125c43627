"""The contrastive layout."""

from dataserver.planning.layouts.contrastive.ablation import stair
from dataserver.planning.layouts.contrastive.alternatives import alternatives
from dataserver.planning.layouts.contrastive.limits import TowerLimits
from dataserver.planning.layouts.contrastive.planner import plan
from dataserver.planning.layouts.contrastive.programs import programs
from dataserver.planning.layouts.contrastive.timeline import bound_ns, timeline
from dataserver.planning.layouts.interface import Layout
from dataserver.planning.plan.expectation import loads

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
