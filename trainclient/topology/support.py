"""Which layouts this trainer runs, and what servers plan and serve but it does not run."""

from dataserver.planning.colocated.options import ColocatedOptions
from dataserver.planning.contrastive.options import ContrastiveOptions
from dataserver.planning.job import Execution
from dataserver.planning.pipelined.options import PipelinedOptions


class TopologyError(ValueError):
    """Processes that do not fit the job."""


def require_supported(execution: Execution) -> None:
    """Raise TopologyError for the first thing in a job that this trainer cannot run, with what to change."""
    if not isinstance(execution.layout, PipelinedOptions | ColocatedOptions | ContrastiveOptions):
        raise TopologyError(
            f"the job's layout is {execution.layout.kind}; this trainer runs pipelines, colocated modules and "
            "contrastive towers, set layout.kind to pipelined, colocated or contrastive"
        )
    for module in execution.modules:
        if module.sp > 1:
            raise TopologyError(
                f"module {module.name} has sp {module.sp}; this trainer does not split sequences, set sp to 1 and "
                "raise dp, tp or pp instead"
            )
        if module.tp > 1 and module.modality is not None:
            raise TopologyError(
                f"tower {module.name} has tp {module.tp}; this trainer does not split the layers of towers, set tp to "
                "1 and raise dp or pp instead"
            )
        if module.padded:
            raise TopologyError(f"module {module.name} is padded; this trainer does not pad items, leave padded out")


def shares_processes(execution: Execution) -> bool:
    """Whether every process runs all modules."""
    return isinstance(execution.layout, ColocatedOptions)
