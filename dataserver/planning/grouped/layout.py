"""The grouped layout."""

from dataserver.planning.grouped.alternatives import alternatives
from dataserver.planning.grouped.bounds import bound_ns
from dataserver.planning.grouped.options import GroupedOptions
from dataserver.planning.grouped.planner import baseline, plan
from dataserver.planning.grouped.sequences import loads
from dataserver.planning.grouped.timeline import timeline
from dataserver.planning.identity import Job
from dataserver.planning.job import JobSpec
from dataserver.planning.layout import Layout
from dataserver.planning.limits import BackboneLimits
from dataserver.planning.plan import StepPlan
from dataserver.planning.sequences import fill_percent
from dataserver.planning.waves import wave_programs


def _limits(spec: JobSpec) -> BackboneLimits:
    degree = spec.execution.options(GroupedOptions).max_degree
    return BackboneLimits(spec, degree=degree, remedy="raise layout.max_degree, lower stream.seq_len")


def _figures(_own: Job, job: Job, plan: StepPlan) -> dict[str, float]:
    return fill_percent(job, plan)


LAYOUT = Layout(
    plan=plan,
    baseline=baseline,
    programs=wave_programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=_limits,
    alternatives=alternatives,
    figures=_figures,
)
