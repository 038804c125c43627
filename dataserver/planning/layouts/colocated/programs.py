"""What every rank of a colocated step does: one phase after the other."""

from collections.abc import Sequence

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.colocated.options import ColocatedOptions
from dataserver.planning.plan.plan import ModuleSchedule, round_size
from dataserver.planning.simulation import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    REDUCE,
    UNSHARD,
    Operations,
    Program,
    passes,
)


def programs(execution: Execution, schedules: Sequence[ModuleSchedule], num_microbatches: int) -> tuple[Program, ...]:
    """The program that all ranks run; `Program.modules` are the modules by depth."""
    operations = Operations.joined(step_phases(execution, num_microbatches, round_size(schedules, num_microbatches)))
    return (Program(tuple(m.name for m in execution.by_depth), 0, operations),)


def step_phases(execution: Execution, num_microbatches: int, size: int) -> list[Operations]:
    """The phases of all rounds of `size` microbatches, one round after the other (`_round_phases`).

    Behind each of them all ranks meet. Where a round ends with the module with which the next one begins, both are one
    phase: no rows cross between them. An operation's chunk is the module's place in `Execution.by_depth`. Parameters of
    a module are gathered when its first phase begins, and its gradients summed behind its last one, so that ranks hold
    no more of other modules than their shares.
    """
    found = list[Operations]()
    for first in range(0, num_microbatches, size):
        yield_point()
        begin, *others = _round_phases(execution, np.arange(first, min(first + size, num_microbatches), dtype=np.int64))
        if found and found[-1].chunk[0] == begin.chunk[0]:
            begin = found.pop() + begin
        found += [begin, *others]
    of_phase, once = [int(phase.chunk[0]) for phase in found], np.zeros(1, np.int64)
    for chunk, module in enumerate(execution.by_depth):
        begin_at, end_at = of_phase.index(chunk), len(found) - 1 - of_phase[::-1].index(chunk)
        found[begin_at] = passes(UNSHARD, once, once + chunk) + found[begin_at]
        if not module.frozen:
            found[end_at] += passes(REDUCE, once, once + chunk)
    return found


def _round_phases(execution: Execution, microbatches: I64) -> list[Operations]:
    """Encoders forward, backbone forward, generators forward and backward, backbone backward, encoders backward.

    Without a generator the backbone goes backward right after each forward, in one phase. Modules that cost no backward
    run none. What a phase leaves for others, rows or gradients that somebody takes, is exchanged at its end.
    """
    modules, backbone = execution.by_depth, execution.backbone
    encoders, generators = (execution.of_kind(kind) for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR))

    def phase(module: ModuleSpec, *kinds: int, leaves: bool) -> Operations:
        done = [k for k in kinds if k == FORWARD or module.cost.backward_percent]
        kind, number = np.tile(np.array(done, np.int64), len(microbatches)), microbatches.repeat(len(done))
        if done and leaves:
            kind, number = np.append(kind, EXCHANGE), np.append(number, microbatches[-1])
        return Operations(kind, number, np.full(len(kind), modules.index(module), np.int64))

    returns = any(m.runs_backward for m in encoders)
    found = [
        *(phase(m, FORWARD, leaves=True) for m in encoders),
        phase(backbone, *([FORWARD] if generators else [FORWARD, BACKWARD]), leaves=bool(generators) or returns),
        *(phase(m, FORWARD, BACKWARD, leaves=backbone.runs_backward) for m in generators),
        *([phase(backbone, BACKWARD, leaves=returns)] if generators else []),
        *(phase(m, BACKWARD, leaves=False) for m in reversed(encoders)),
    ]
    return [operations for operations in found if len(operations)]


def first_pass(phase: Operations) -> int:
    """Position of a phase's first pass: what comes before it needs none of the rows that the phase waits for."""
    return int(np.argmax(phase.kind <= BACKWARD))


def schedules(execution: Execution, num_microbatches: int, size: int) -> tuple[ModuleSchedule, ...]:
    """Microbatches that each module holds between forward and backward: a round where another phase comes between."""
    layout, drain_every = execution.options(ColocatedOptions), 0 if size == num_microbatches else size
    return tuple(
        ModuleSchedule(m.name, np.array([size if layout.keeps_step(execution, m) else 1], np.int64), drain_every)
        for m in execution.modules
    )
