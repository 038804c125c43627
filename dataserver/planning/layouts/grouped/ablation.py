"""From canonical order to a grouped job."""

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.layouts.shared.ablation import (
    Stair,
    canonical_modules,
    climb,
    images,
    in_flight,
    memory,
    order,
    packing,
    strict,
)
from dataserver.planning.layouts.shared.alternatives import Edit, edit_layout, edit_modules


def stair(job: Job) -> tuple[Stair, ...]:
    """The baseline: groups of the largest degree, best-fit packing, the images of every wave dealt out evenly.

    Microbatches run as they come, and encoders and generators have endless memory.
    """
    own = job.spec.execution
    plain = own.model_copy(update={"modules": canonical_modules(job)})
    kept = {"memory": own.backbone.memory, "balance": own.backbone.balance}  # groups spread sequences, within memory
    plain = edit_modules([own.backbone.name], **kept)(plain)
    baseline = edit_layout(policy=GroupPolicy.STATIC)(strict(own)(plain))
    changes = packing(job), *_groups(job), *(change(job) for change in (images, memory, order, in_flight))
    return climb(job, "groups of the largest degree", baseline, changes)


def _groups(job: Job) -> list[tuple[str, Edit]]:
    """One degree for all groups of a step, then unequal ones, as far as the job goes."""
    found = []
    policy = job.spec.execution.options(GroupedOptions).policy
    if policy is not GroupPolicy.STATIC:
        found.append(("the best degree of each step", edit_layout(policy=GroupPolicy.HOMOGENEOUS)))
    if policy is GroupPolicy.SEARCH:
        found.append(("unequal groups", edit_layout(policy=policy)))
    return found
