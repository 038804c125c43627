"""Other ways to run a grouped job."""

from dataserver.planning.job.fields import ModuleKind, Schedule
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.layouts.shared.alternatives import (
    Alternatives,
    Dimension,
    balance_of,
    edit_layout,
    extras,
    orders,
    packings,
)


def alternatives(job: Job) -> Alternatives:
    """Packing and groups together; beside images each balance, the order and what is in flight on their own."""
    execution = job.spec.execution
    groups = Dimension("groups", {p.value: edit_layout(policy=p) for p in GroupPolicy})
    outer = [m for m in execution.modules if m.kind is not ModuleKind.BACKBONE]
    single = [balance_of(m) for m in outer if m.dp > 1]
    if outer:
        single.append(orders())
        if execution.options(GroupedOptions).schedule is Schedule.ONE_F_ONE_B:
            single.append(extras())
    return Alternatives([*packings(job), groups], single)
