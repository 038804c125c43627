"""Which layouts this trainer runs, and what servers plan and serve but it does not run."""

from typing import Final

from dataserver.planning.job import Execution

LAYOUTS: Final = ("pipelined", "colocated", "contrastive", "grouped")
"""Kinds of layouts whose programs this trainer runs. Their options say how modules lie on its processes."""


class TopologyError(ValueError):
    """Processes that do not fit the job."""


def require_supported(execution: Execution) -> None:
    """Raise TopologyError for the first thing in a job that this trainer cannot run, with what to change."""
    if execution.layout.kind not in LAYOUTS:
        raise TopologyError(
            f"the job's layout is {execution.layout.kind}, which this trainer does not run; set layout.kind to one of "
            f"{', '.join(LAYOUTS)}"
        )
    if execution.identity_routing:
        raise TopologyError(
            "the job has identity_routing, for trainers whose ranks run all modules of a pipeline; this one gives each "
            "module processes of its own: leave identity_routing out"
        )
    for module in execution.modules:
        if module.sp > 1:
            raise TopologyError(
                f"module {module.name} has sp {module.sp}; this trainer does not split sequences, set sp to 1 and "
                "raise dp, tp or pp instead"
            )
        if module.padded:
            raise TopologyError(f"module {module.name} is padded; this trainer does not pad items, leave padded out")
