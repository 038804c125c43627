"""Other ways to run a contrastive job."""

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions, ContrastiveSchedule
from dataserver.planning.layouts.shared.alternatives import (
    Alternatives,
    Dimension,
    balance_of,
    balances,
    edit_layout,
    extras,
)


def alternatives(job: Job) -> Alternatives:
    """Schedule and balance together; each balance and what is in flight on their own."""
    execution = job.spec.execution
    sync, pipe = ContrastiveSchedule
    edits = {sync.value: edit_layout(schedule=sync, extra_in_flight=0), pipe.value: edit_layout(schedule=pipe)}
    single = [balance_of(m) for m in execution.modules]
    if execution.options(ContrastiveOptions).schedule is pipe:
        single.append(extras())
    return Alternatives([Dimension("schedule", edits), balances(execution)], single)
