"""What servers plan and serve but this trainer does not run, whatever the layout."""

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.spec import Execution
from trainclient.layouts.registry import LAYOUTS, is_registered


class TopologyError(ValueError):
    """Processes that do not fit the job."""


def require_supported(execution: Execution) -> None:
    """Raise TopologyError for the first thing in a job that this trainer cannot run, with what to change."""
    if not is_registered(execution.layout.kind):
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
        if module.sp > 1 and not is_backbone:
            raise unsplit_sequences(module)
        if module.padded:
            raise TopologyError(f"module {module.name} is padded; this trainer does not pad items, leave padded out")


def unsplit_sequences(module: ModuleSpec) -> TopologyError:
    """The error of a module whose sequences are to be split where this trainer does not split them."""
    return TopologyError(
        f"module {module.name} has sp {module.sp}; this trainer splits the sequences of backbones alone, on devices of "
        "their own: set sp to 1 and raise dp or tp instead"
    )
