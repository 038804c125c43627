"""The contrastive layout: towers, and a loss over the pairs of a batch."""

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.contrastive.limits import TowerLimits
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions, ContrastiveSchedule
from dataserver.planning.layouts.contrastive.planner import plan
from dataserver.planning.layouts.contrastive.programs import programs
from dataserver.planning.layouts.contrastive.timeline import bound_ns, timeline
from dataserver.planning.layouts.interface import Layout
from dataserver.planning.layouts.shared.ablation import (
    AblationEntry,
    canonical_modules,
    cumulative_ablation,
    memory,
    pairs,
)
from dataserver.planning.layouts.shared.alternatives import (
    Alternatives,
    Dimension,
    balance_of,
    balances,
    edit_layout,
    extras,
)
from dataserver.planning.plan.expectation import loads


def ablation(job: Job) -> tuple[AblationEntry, ...]:
    """The baseline: canonical order dealt out in runs, one contrastive batch after the other.

    As if memory were endless.
    """
    own = job.spec.execution
    options = own.options(ContrastiveOptions)
    plain = own.model_copy(update={"modules": canonical_modules(job)})
    baseline = edit_layout(schedule=ContrastiveSchedule.BATCH_SYNC, extra_in_flight=0)(plain)
    overlap = edit_layout(schedule=options.schedule, extra_in_flight=options.extra_in_flight)
    return cumulative_ablation(
        job, "canonical order", baseline, (pairs(job), memory(job), (str(options.schedule), overlap))
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


LAYOUT = Layout(
    plan=plan,
    ablation=ablation,
    finalists=lambda _: (),  # balanced and in canonical order, under both schedules: all are compared
    programs=programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=TowerLimits,
    alternatives=alternatives,
    figures=lambda _own, _job, _plan: {},
)
