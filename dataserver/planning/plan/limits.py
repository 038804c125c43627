"""Refusal of plans with too many microbatches."""

from dataserver.planning.job.limits import most_microbatches
from dataserver.planning.job.spec import Execution
from dataserver.planning.stream.sizing import MicrobatchTooLargeError


def check_microbatches(execution: Execution, found: int) -> None:
    """Refuse a number of microbatches that only a step's samples, and memory, ask for.

    Raises:
        MicrobatchTooLargeError: it is beyond what may be planned.
    """
    most = most_microbatches(execution)
    if found > most:
        raise MicrobatchTooLargeError(
            f"memory asks for {found:,} microbatches of each rank; plan_version {execution.plan_version} takes at most "
            f"{most:,} here (step_microbatches, step_operations): raise memory.budget_bytes, memory.step_bytes where "
            "it is given, or dp, or lower stream.global_batch"
        )
