"""The pipelined layout."""

from dataserver.planning.expectation import loads
from dataserver.planning.identity import Job
from dataserver.planning.layout import Layout
from dataserver.planning.limits import BackboneLimits
from dataserver.planning.pipelined.alternatives import alternatives
from dataserver.planning.pipelined.planner import baseline, bound_ns, plan
from dataserver.planning.pipelined.programs import programs
from dataserver.planning.pipelined.timeline import timeline
from dataserver.planning.plan import StepPlan
from dataserver.planning.sequences import empty_percent, fill_percent


def _figures(_own: Job, job: Job, plan: StepPlan) -> dict[str, float]:
    return fill_percent(job, plan) | empty_percent(job, plan)


LAYOUT = Layout(
    plan=plan,
    baseline=baseline,
    programs=programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=BackboneLimits,
    alternatives=alternatives,
    figures=_figures,
)
