"""How many passes interleaved stages hold: what the schedule asks for, within memory."""

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import Memory, ModuleKind, ModuleSpec, Schedule
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.pipelined.options import PipelinedOptions
from dataserver.planning.layouts.pipelined.programs import interleaved_in_flight, interleaved_operations
from dataserver.planning.layouts.shared.waves import InFlight, Units, in_flight, most_in_flight
from dataserver.planning.simulation import FORWARD


def stages_in_flight(execution: Execution, num_microbatches: int, extra: int, units: Units) -> InFlight | None:
    """What every stage of the joined pipeline holds (`waves.in_flight`).

    Of interleaved stages the backbone counts passes of a microbatch through one chunk, the others microbatches; None if
    memory is too small for their programs.
    """
    if execution.options(PipelinedOptions).schedule is not Schedule.INTERLEAVED:
        return in_flight(execution, num_microbatches, extra, units)
    if not execution.backbone.runs_backward:
        return _one_at_a_time(execution)
    extra = 2 if execution.of_kind(ModuleKind.GENERATOR) else 0  # one stage more for gradients to come back from
    backbone, chunks = execution.backbone, execution.options(PipelinedOptions).chunks
    passes = num_microbatches * chunks
    wanted = {backbone.name: np.minimum(interleaved_in_flight(backbone.pp, chunks) + extra, passes)}
    least = min((chunks - 1) * backbone.pp + 1, passes)
    outer = [m for m in execution.modules if m.kind is not ModuleKind.BACKBONE]
    most = {
        m.name: most_in_flight(units[m.name], m.memory.units, num_microbatches) for m in outer if m.memory is not None
    }
    first = int(wanted[backbone.name][0])
    for top in range(first, least - 1, -1):
        ahead = _taken_ahead(backbone.pp, chunks, num_microbatches, top)
        waiting = {m.name for m in outer if m.kind is ModuleKind.ENCODER and m.runs_backward}
        need = {m.name: ahead if m.name in waiting else 1 for m in outer}
        if top == first:
            more = {m.name: min(need[m.name] + (m.name in waiting), num_microbatches) for m in outer}
            wanted |= {name: np.array([number]) for name, number in more.items()}
        fits = backbone.memory is None or _fits(backbone, units[backbone.name], chunks, top)
        if fits and all(most.get(name, number) >= number for name, number in need.items()):
            held = {backbone.name: np.minimum(wanted[backbone.name], top)}
            for m in outer:
                held[m.name] = np.minimum(wanted[m.name], most.get(m.name, num_microbatches))
            limits = most if backbone.memory is None else most | {backbone.name: top}
            return InFlight(held, wanted, limits, {backbone.name: chunks})
    return None


def _one_at_a_time(execution: Execution) -> InFlight:
    """Where the backbone runs no backward, nor encoders before it, nobody holds a second pass until it runs one."""
    held = {m.name: np.ones(m.pp, np.int64) for m in execution.modules}
    chunks = execution.options(PipelinedOptions).chunks
    return InFlight(held, held, {}, {execution.backbone.name: chunks})


def too_small(execution: Execution, num_microbatches: int, units: Units) -> ModuleSpec:
    """The module whose memory does not hold what the shortest interleaved lists need (`stages_in_flight` is None)."""
    backbone, chunks = execution.backbone, execution.options(PipelinedOptions).chunks
    least = min((chunks - 1) * backbone.pp + 1, num_microbatches * chunks)
    if backbone.memory is not None and not _fits(backbone, units[backbone.name], chunks, least):
        return backbone
    holds = {
        m.name: most_in_flight(units[m.name], m.memory.units, num_microbatches)
        for m in execution.of_kind(ModuleKind.ENCODER)
        if m.memory is not None
    }
    return execution.module(min(holds, key=lambda name: holds[name]))


def _taken_ahead(pp: int, chunks: int, num_microbatches: int, passes: int) -> int:
    """Microbatches that the first stage takes from an encoder before it returns the gradient of the first of them."""
    operations = interleaved_operations(0, pp, chunks, num_microbatches, passes)
    outer = operations.kind[operations.chunk == 0] == FORWARD
    held_before = np.cumsum(np.where(outer, 1, -1)) + ~outer  # a gradient is returned from what is held until then
    return int(held_before[~outer].max(initial=0))


def _fits(module: ModuleSpec, units: I64, chunks: int, passes: int) -> bool:
    """Whether memory holds what so many passes in flight need at their peak, on every rank."""
    if module.memory is None:
        return True
    held = interleaved_passes(module.memory, units, chunks)
    operations = interleaved_operations(0, module.pp, chunks, units.shape[1], passes)
    sign = np.where(operations.kind == FORWARD, 1, -1)
    changes: I64 = held[:, operations.chunk, operations.microbatch] * sign
    return int(changes.cumsum(axis=1).max(initial=0)) <= module.memory.budget_bytes


def interleaved_passes(memory: Memory, units: I64, chunks: int) -> I64:
    """Bytes that a pass of each microbatch through each of a stage's chunks holds; together those of the microbatch.

    int64 [ranks, chunks, microbatches] for `units` int64 [ranks, microbatches].
    """
    upto = units[:, None] * memory.unit_bytes * np.arange(chunks + 1)[:, None] // chunks
    return np.diff(upto, axis=1)
