"""From canonical order to a pipelined job."""

from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.shared.ablation import (
    Stair,
    canonical_modules,
    climb,
    images,
    in_flight,
    memory,
    order,
    packing,
    parity,
    sequences,
    strict,
)


def stair(job: Job) -> tuple[Stair, ...]:
    """The baseline: best-fit packing, canonical order, the images of every wave dealt out evenly over all ranks.

    Where images stay on the ranks of their sequences, they do so here, too. As if memory were endless. The schedule and
    its model chunks are the job's.
    """
    own = job.spec.execution
    spread = BalancePolicy.NONE if own.identity_routing else BalancePolicy.EVEN
    plain = {"modules": canonical_modules(job, spread), "modality_parity": None}
    baseline = strict(own)(own.model_copy(update=plain))
    changes = (packing, images, sequences, memory, order, in_flight, parity)
    return climb(job, "canonical order", baseline, (change(job) for change in changes))
