"""Which layouts this trainer runs, and what servers plan and serve but it does not run."""

from dataserver.planning.colocated.options import ColocatedOptions
from dataserver.planning.contrastive.options import ContrastiveOptions
from dataserver.planning.grouped.options import GroupedOptions
from dataserver.planning.job import Execution
from dataserver.planning.pipelined.options import PipelinedOptions


class TopologyError(ValueError):
    """Processes that do not fit the job."""


def require_supported(execution: Execution) -> None:
    """Raise TopologyError for the first thing in a job that this trainer cannot run, with what to change."""
    if not isinstance(execution.layout, PipelinedOptions | ColocatedOptions | ContrastiveOptions | GroupedOptions):
        raise TopologyError(
            f"the job's layout is {execution.layout.kind}; this trainer runs pipelines, colocated modules, contrastive "
            "towers and sequence-parallel groups, set layout.kind to pipelined, colocated, contrastive or grouped"
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


def shares_processes(execution: Execution) -> bool:
    """Whether every process runs all modules."""
    return isinstance(execution.layout, ColocatedOptions)


def group_degrees(execution: Execution) -> tuple[int, ...]:
    """Degrees of the groups of backbone ranks that may share sequences, ascending; none in other layouts."""
    layout = execution.layout
    if not isinstance(layout, GroupedOptions):
        return ()
    return tuple(1 << p for p in range(layout.min_degree.bit_length() - 1, layout.max_degree.bit_length()))
