"""The grouped layout: ranks that share sequences in groups."""

from dataserver.planning.job.fields import ModuleKind, Schedule
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.grouped.bounds import bound_ns
from dataserver.planning.layouts.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.layouts.grouped.planner import plan
from dataserver.planning.layouts.grouped.sequences import loads
from dataserver.planning.layouts.grouped.timeline import timeline
from dataserver.planning.layouts.interface import Layout
from dataserver.planning.layouts.shared.ablation import (
    AblationEntry,
    canonical_modules,
    cumulative_ablation,
    images,
    in_flight,
    memory,
    order,
    packing,
    strict,
)
from dataserver.planning.layouts.shared.ablation_finalists import finalists
from dataserver.planning.layouts.shared.alternatives import (
    Alternatives,
    Dimension,
    Edit,
    balance_of,
    edit_layout,
    edit_modules,
    extras,
    orders,
    packings,
)
from dataserver.planning.layouts.shared.limits import BackboneLimits
from dataserver.planning.layouts.shared.sequences import fill_percent
from dataserver.planning.layouts.shared.waves import wave_programs

REMEDY = "raise layout.max_degree, lower stream.seq_len"


def ablation(job: Job) -> tuple[AblationEntry, ...]:
    """The baseline: groups of the largest degree, best-fit packing, the images of every wave dealt out evenly.

    Microbatches run as they come, and encoders and generators have endless memory.
    """
    own = job.spec.execution
    plain = own.model_copy(update={"modules": canonical_modules(job)})
    kept = {"memory": own.backbone.memory, "balance": own.backbone.balance}  # groups spread sequences, within memory
    plain = edit_modules([own.backbone.name], **kept)(plain)
    baseline = edit_layout(policy=GroupPolicy.STATIC)(strict(own)(plain))
    changes = packing(job), *_groups(job), *(change(job) for change in (images, memory, order, in_flight))
    return cumulative_ablation(job, "groups of the largest degree", baseline, changes)


def _groups(job: Job) -> list[tuple[str, Edit]]:
    """One degree for all groups of a step, then unequal ones, as far as the job goes."""
    found = []
    policy = job.spec.execution.options(GroupedOptions).policy
    if policy is not GroupPolicy.STATIC:
        found.append(("the best degree of each step", edit_layout(policy=GroupPolicy.HOMOGENEOUS)))
    if policy is GroupPolicy.SEARCH:
        found.append(("unequal groups", edit_layout(policy=policy)))
    return found


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


LAYOUT = Layout(
    plan=plan,
    ablation=ablation,
    finalists=lambda job: finalists(job, ablation(job)),
    programs=wave_programs,
    timeline=timeline,
    lower_bound_ns=bound_ns,
    loads=loads,
    limits=lambda spec: BackboneLimits(spec, degree=spec.execution.options(GroupedOptions).max_degree, remedy=REMEDY),
    alternatives=alternatives,
    figures=lambda _own, job, plan: fill_percent(job, plan),
)
