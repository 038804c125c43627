"""From the baseline to a colocated job."""

from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.shared.ablation import (
    Stair,
    canonical_modules,
    climb,
    images,
    memory,
    packing,
    sequences,
)
from dataserver.planning.layouts.shared.alternatives import Edit, edit_modules


def stair(job: Job) -> tuple[Stair, ...]:
    """The baseline: best-fit packing, sequences in their order, images on the rank of theirs.

    As if memory were endless. Where all modules share their ranks, that is how any data-parallel trainer runs.
    """
    own = job.spec.execution
    baseline = own.model_copy(update={"modules": canonical_modules(job, images=BalancePolicy.NONE)})
    changes = *_evenly(job), *(change(job) for change in (packing, images, sequences, memory))
    return climb(job, "images beside their sequences", baseline, changes)


def _evenly(job: Job) -> list[tuple[str, Edit]]:
    """Equal counts of images first, where the job balances them."""
    spread = [m.name for m in job.spec.execution.modules if m.handles_images and not m.balance.keeps_order]
    return [("images dealt out evenly", edit_modules(spread, balance=BalancePolicy.EVEN))]
