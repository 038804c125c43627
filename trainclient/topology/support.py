"""Which layouts this trainer runs, and what servers plan and serve but it does not run."""

from typing import Final

from dataserver.planning.job.spec import Execution

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
        is_backbone = module.holds_samples and not module.makes_features
        if module.sp > 1 and (execution.layout.shares_ranks or not is_backbone):
            raise TopologyError(
                f"module {module.name} has sp {module.sp}; this trainer splits the sequences of backbones alone, on "
                "devices of their own: set sp to 1 and raise dp or tp instead"
            )
        if module.padded:
            raise TopologyError(f"module {module.name} is padded; this trainer does not pad items, leave padded out")
