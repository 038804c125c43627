"""Modality parity of a plan: whether in each wave all ranks of the backbone have images or none has."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.spec import Execution
from dataserver.planning.plan.naming import counted
from dataserver.planning.plan.plan import ArrangedStep, Decision, Routing


def ranks_with_images(execution: Execution, plan: ArrangedStep) -> I64:
    """Ranks of the backbone that have images in each wave. int64 [microbatches]."""
    dp, into = execution.backbone.dp, _into_backbone(execution, plan)
    places = [r.target_microbatch * dp + r.target_rank for r in into]
    return np.bincount(np.unique(np.concatenate(places)) // dp, minlength=plan.num_microbatches)


def has_parity(execution: Execution, plan: ArrangedStep, wave: int) -> bool:
    """Whether in a wave all ranks of the backbone have images of encoders, or none has."""
    ranks = [r.target_rank[r.target_microbatch == wave] for r in _into_backbone(execution, plan)]
    return len(np.unique(np.concatenate(ranks))) in (0, execution.backbone.dp)


def parity_decision(execution: Execution, plan: ArrangedStep) -> Decision:
    """Say in how many waves parity holds, and why not in the others."""
    dp, ranks = execution.backbone.dp, ranks_with_images(execution, plan)
    some, waves = np.flatnonzero(ranks), counted(plan.num_microbatches, "wave")
    broken = some[ranks[some] < dp]
    if not len(broken):
        return Decision("step", f"images on all ranks or on none in {waves}", f"{len(some)} have images")
    where = f"{ranks[broken[0]]} of {counted(dp, 'rank')} have images in wave {broken[0]}"
    reason = "no way was found to share the samples with images evenly, within memory and the length of sequences"
    return Decision("step", f"images on some ranks only in {len(broken)} of {waves}", f"{where}; {reason}")


def _into_backbone(execution: Execution, plan: ArrangedStep) -> list[Routing]:
    """The rows of images, from each encoder."""
    return [r for r in plan.routings if r.target_module == execution.backbone.name]
