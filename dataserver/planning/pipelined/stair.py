"""From canonical order to a pipelined job."""

from dataserver.planning.identity import Job
from dataserver.planning.stair import (
    Stair,
    canonical_modules,
    climb,
    images,
    in_flight,
    memory,
    order,
    packing,
    sequences,
    strict,
)


def stair(job: Job) -> tuple[Stair, ...]:
    """The baseline: best-fit packing, canonical order, the images of every wave dealt out evenly over all ranks.

    As if memory were endless. The schedule and its model chunks are the job's.
    """
    own = job.spec.execution
    baseline = strict(own)(own.model_copy(update={"modules": canonical_modules(job)}))
    changes = (packing, images, sequences, memory, order, in_flight)
    return climb(job, "canonical order", baseline, (change(job) for change in changes))
