"""What a run is about to train, what that takes of devices, and how long a step should take: said before the first."""

from collections.abc import Callable, Sequence
from typing import Final

from disttrain.v1.plan_pb2 import StepPlan

from dataserver.planning.job.fields import ModuleSpec, default_cost
from dataserver.planning.plan.naming import milliseconds
from dataserver.process import in_one_line
from trainclient.report import aligned
from trainclient.stream.errors import ClientError
from trainclient.topology.process_grid import Topology
from trainclient.training.memory_need import State, states
from trainclient.training.models import Models

_HEAD: Final = ("module", "kind", "parameters", "trained", "devices", "GB of each for them", "GB for activations")
_UNKNOWN: Final = "not known"


def overview(models: Models, topology: Topology, step: int, get_plan: Callable[[int], StepPlan]) -> str:
    """The table of what will train, and the step that the job's costs promise.

    Args:
        models: of the run.
        topology: of its processes.
        step: the first one.
        get_plan: asks a server for the plan of a step.
    """
    found = states(models, topology)
    lines = [*aligned([_HEAD, *map(_row, found)]), *_about_devices(found, topology)]
    return "\n".join([*lines, _expected(models, step, get_plan)]) + "\n"


def _row(state: State) -> tuple[str, ...]:
    m = state.module
    degrees = " x ".join(f"{name} {n}" for name in ("dp", "pp", "tp", "sp") if (n := getattr(m, name)) > 1)
    devices = f"{m.replicas * m.pp * m.tp:,}" + (f" ({degrees})" if degrees else "")
    memory = _UNKNOWN if m.memory is None else _gigabytes(m.memory.budget_bytes)
    if state.parameters is None or state.state_bytes is None:
        return m.name, f"{m.kind}", _UNKNOWN, "frozen" if m.frozen else _UNKNOWN, devices, _UNKNOWN, memory
    trained = "frozen" if m.frozen else _millions(state.trained)
    counts = _millions(state.parameters), trained
    return m.name, f"{m.kind}", *counts, devices, _gigabytes(state.state_bytes), memory


def _about_devices(found: Sequence[State], topology: Topology) -> list[str]:
    """What the table leaves open."""
    lines = []
    if any(len(process.modules) > 1 for process in topology.processes):
        lines.append("modules share devices: what they take of each adds up")
    if own := [state.module.name for state in found if state.parameters is None]:
        lines.append(f"not known: what {' and '.join(own)} takes, a module of your own")
    if endless := [state.module.name for state in found if state.module.memory is None]:
        lines.append(
            f"not known: memory for activations of {' and '.join(endless)}, which plans take as endless; `trainclient "
            "memory` prints the fields for the job"
        )
    return lines


def _expected(models: Models, step: int, get_plan: Callable[[int], StepPlan]) -> str:
    """How long the first step takes by the job's costs."""
    try:
        plan = get_plan(step)
    except ClientError as error:  # the stream says so too, if it matters
        return f"not known: the time of a step ({in_one_line(error)})"
    guessed = [m.name for m in models.job.execution.modules if _is_guessed(m)]
    doubt = f"; {' and '.join(guessed)}: the default cost, not one of this model and device" if guessed else ""
    number = plan.num_microbatches
    return (
        f"step {step + 1} should take {milliseconds(plan.makespan_after_ns)} by the job's costs, the optimizer not "
        f"counted, in {number:,} microbatch{'' if number == 1 else 'es'} of each rank{doubt}"
    )


def _is_guessed(m: ModuleSpec) -> bool:
    """Whether a module has the cost of one that states none."""
    fields = default_cost(m.kind, m.modality).fields_of(m.kind, m.tp, m.sp)
    return all(getattr(m.cost, name) == fields.get(name, 0) for name in ("microbatch_ns", "linear_ps", "quadratic_fs"))


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f}"
