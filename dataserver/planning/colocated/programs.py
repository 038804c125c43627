"""What every rank of a colocated step does: one phase after the other."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning.colocated.options import ColocatedOptions
from dataserver.planning.job import Execution
from dataserver.planning.jobspec import ModuleKind, ModuleSpec
from dataserver.planning.plan import ModuleSchedule
from dataserver.planning.simulation import BACKWARD, FORWARD, Operations, Program


def programs(
    execution: Execution,
    schedules: Sequence[ModuleSchedule],  # noqa: ARG001 (what a rank holds follows from the phases)
    num_microbatches: int,
) -> tuple[Program, ...]:
    """The program that all ranks run; `Program.modules` are the modules by depth."""
    operations = joined(step_phases(execution, num_microbatches))
    return (Program(tuple(m.name for m in execution.by_depth), 0, operations),)


def joined(phases: Sequence[Operations]) -> Operations:
    """The operations of several phases, one after the other."""
    return sum(phases[1:], phases[0])


def step_phases(execution: Execution, num_microbatches: int) -> list[Operations]:
    """Encoders forward, backbone forward, generators forward and backward, backbone backward, encoders backward.

    Behind each of them all ranks meet. Without a generator the backbone goes backward right after each forward, in one
    phase. Modules that cost no backward run none. An operation's chunk is the module's place in `Execution.by_depth`.
    """
    modules, microbatch = execution.by_depth, np.arange(num_microbatches, dtype=np.int64)
    encoders, generators = (execution.of_kind(kind) for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR))

    def phase(module: ModuleSpec, *kinds: int) -> Operations:
        done = [k for k in kinds if k == FORWARD or module.cost.backward_percent]
        kind, number = np.tile(np.array(done, np.int64), num_microbatches), microbatch.repeat(len(done))
        return Operations(kind, number, np.full(len(kind), modules.index(module), np.int64))

    found = [
        *(phase(m, FORWARD) for m in encoders),
        phase(execution.backbone, *([FORWARD] if generators else [FORWARD, BACKWARD])),
        *(phase(m, FORWARD, BACKWARD) for m in generators),
        *([phase(execution.backbone, BACKWARD)] if generators else []),
        *(phase(m, BACKWARD) for m in reversed(encoders)),
    ]
    return [operations for operations in found if len(operations)]


def schedules(execution: Execution, microbatches: int) -> tuple[ModuleSchedule, ...]:
    """Microbatches that each module holds between forward and backward: all where another phase comes between."""
    layout = execution.options(ColocatedOptions)
    return tuple(
        ModuleSchedule(m.name, np.array([microbatches if layout.keeps_step(execution, m) else 1], np.int64))
        for m in execution.modules
    )
