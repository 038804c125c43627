"""Refusal of plans with too many microbatches."""

from dataserver.planning.job.limits import most_microbatches
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.stream.sizing import MicrobatchTooLargeError


def check_microbatches(spec: JobSpec, found: int) -> None:
    """Refuse a number of microbatches that only a step's samples, and memory or a budget of packing, ask for.

    Raises:
        MicrobatchTooLargeError: it is beyond what may be planned.
    """
    execution, most = spec.execution, most_microbatches(spec.execution)
    if found > most:
        who, remedy = "memory asks", ""
        if any(spec.stream.packing.budget):
            who, remedy = "memory, or the budget of packing (max_images, max_clips, max_videos), asks", "that budget, "
        raise MicrobatchTooLargeError(
            f"{who} for {found:,} microbatches of each rank; plan_version {execution.plan_version} takes at most "
            f"{most:,} here (step_microbatches, step_operations): raise {remedy}memory.budget_bytes, memory.step_bytes "
            "where it is given, or dp, or lower stream.global_batch"
        )
