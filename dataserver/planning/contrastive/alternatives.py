"""Other ways to run a contrastive job."""

from dataserver.planning.alternatives import (
    Alternatives,
    Dimension,
    balance_of,
    balances,
    edit_layout,
    extras,
)
from dataserver.planning.contrastive.options import ContrastiveOptions, ContrastiveSchedule
from dataserver.planning.identity import Job


def alternatives(job: Job) -> Alternatives:
    """Schedule and balance together; each balance and what is in flight on their own."""
    execution = job.spec.execution
    schedules = Dimension(
        "schedule",
        {
            ContrastiveSchedule.BATCH_SYNC.value: edit_layout(
                schedule=ContrastiveSchedule.BATCH_SYNC, extra_in_flight=0
            ),
            ContrastiveSchedule.DISTMM_PIPE.value: edit_layout(schedule=ContrastiveSchedule.DISTMM_PIPE),
        },
    )
    single = [balance_of(m) for m in execution.modules]
    if execution.options(ContrastiveOptions).schedule is ContrastiveSchedule.DISTMM_PIPE:
        single.append(extras())
    return Alternatives([schedules, balances(execution)], single)
