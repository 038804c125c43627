"""The colocated layout."""

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.colocated.ablation import stair
from dataserver.planning.layouts.colocated.alternatives import alternatives
from dataserver.planning.layouts.colocated.limits import ColocatedLimits
from dataserver.planning.layouts.colocated.options import ColocatedOptions
from dataserver.planning.layouts.colocated.planner import plan
from dataserver.planning.layouts.colocated.programs import programs
from dataserver.planning.layouts.colocated.timeline import bound_ns, timeline
from dataserver.planning.layouts.interface import Layout
from dataserver.planning.layouts.shared.sequences import empty_percent, fill_percent
from dataserver.planning.plan.expectation import loads
from dataserver.planning.plan.plan import StepPlan


def _figures(own: Job, job: Job, plan: StepPlan) -> dict[str, float]:
    """Bytes are those between the nodes that the job itself has."""
    options = own.spec.execution.options(ColocatedOptions)
    size = options.ranks_per_node
    rows = (int(r.rows[r.source_rank // size != r.target_rank // size].sum()) for r in plan.routings)
    moved = {"between_nodes_bytes": options.row_bytes * sum(rows)}
    return fill_percent(job, plan) | empty_percent(job, plan) | moved


LAYOUT = Layout(
    plan=plan,
    stair=stair,
    programs=programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=ColocatedLimits,
    alternatives=alternatives,
    figures=_figures,
)
