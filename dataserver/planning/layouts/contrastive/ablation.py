"""From canonical order to a contrastive job."""

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions, ContrastiveSchedule
from dataserver.planning.layouts.shared.ablation import Stair, canonical_modules, climb, memory, pairs
from dataserver.planning.layouts.shared.alternatives import edit_layout


def stair(job: Job) -> tuple[Stair, ...]:
    """The baseline: canonical order dealt out in runs, one contrastive batch after the other.

    As if memory were endless.
    """
    own = job.spec.execution
    options = own.options(ContrastiveOptions)
    plain = own.model_copy(update={"modules": canonical_modules(job)})
    baseline = edit_layout(schedule=ContrastiveSchedule.BATCH_SYNC, extra_in_flight=0)(plain)
    overlap = edit_layout(schedule=options.schedule, extra_in_flight=options.extra_in_flight)
    return climb(job, "canonical order", baseline, (pairs(job), memory(job), (str(options.schedule), overlap)))
