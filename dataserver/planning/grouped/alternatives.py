"""Other ways to run a grouped job."""

from dataserver.planning.alternatives import Alternatives, Dimension, balance_of, edit_layout, extras, orders, packings
from dataserver.planning.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import ModuleKind, Schedule


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
