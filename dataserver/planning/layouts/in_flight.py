"""How many microbatches every stage of a pipelined job holds: what the schedule asks for, within memory."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dataserver.planning.jobspec import Execution, ModuleKind, ModuleSpec, Schedule
from dataserver.planning.layouts.held import most_in_flight
from dataserver.planning.layouts.joined import depths, interleaved_passes, pipeline_layout
from dataserver.planning.naming import listed
from dataserver.planning.pipeline import (
    OperationKind,
    gpipe_in_flight,
    interleaved_in_flight,
    interleaved_operations,
    one_f_one_b_in_flight,
)
from dataserver.planning.plan import Decision, ModuleSchedule
from dataserver.planning.samples import I64

AUTOMATIC_EXTRA = 4
"""Microbatches beyond those of 1F1B that are tried where the job leaves it open and every module states its memory."""

Units = Mapping[str, I64]
"""For each module whose memory is to limit it int64 [ranks, microbatches]: the patches or tokens of each microbatch
(`held_units`)."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """What every stage holds, and what it would hold without memory or with more of it."""

    held: Mapping[str, I64]
    """For each module int64 [pp], as of `ModuleSchedule`."""
    wanted: Mapping[str, I64]
    """For each module int64 [pp]: what the schedule asks for."""
    most: Mapping[str, int]
    """For each module with memory: what that holds."""

    @property
    def is_short(self) -> bool:
        """Whether some stage holds less than the schedule asks for."""
        return any((held < self.wanted[name]).any() for name, held in self.held.items())

    def schedules(self, execution: Execution) -> tuple[ModuleSchedule, ...]:
        """One for each module, in the order of the job."""
        return tuple(ModuleSchedule(m.name, self.held[m.name]) for m in execution.modules)


def extras(execution: Execution) -> tuple[int, ...]:
    """Numbers of microbatches beyond those of the schedule that are worth a comparison."""
    layout = pipeline_layout(execution)
    if layout.schedule is not Schedule.ONE_F_ONE_B:
        return (0,)
    most = layout.extra_in_flight
    if most is None:
        most = AUTOMATIC_EXTRA if all(m.memory is not None for m in execution.modules) else 0
    return tuple(sorted({0, min(most, 2), most}))


def in_flight(execution: Execution, num_microbatches: int, extra: int, units: Units) -> InFlight | None:
    """What every stage holds: never more than its memory, than the schedule asks for, or than the stage before.

    None if memory is too small for the lists of the schedule, which only interleaved ones can be.
    """
    layout = pipeline_layout(execution)
    if layout.schedule is Schedule.INTERLEAVED:
        return _interleaved(execution, num_microbatches, units)
    places = depths(execution)
    num_stages = 1 + max(int(place.max()) for place in places.values())
    if layout.schedule is Schedule.GPIPE:
        vector = gpipe_in_flight(num_stages, num_microbatches)
    else:
        vector = one_f_one_b_in_flight(num_stages, extra)
    wanted = {m.name: vector[places[m.name]] for m in execution.modules}
    most = {
        m.name: most_in_flight(units[m.name], m.memory.units, int(wanted[m.name].max()))
        for m in execution.modules
        if m.memory is not None and m.name in units
    }
    caps = vector.copy()
    for name, number in most.items():
        caps[places[name]] = np.minimum(caps[places[name]], number)
    even = evenly(vector, caps)
    held = {m.name: even[places[m.name]] for m in execution.modules}
    for m in execution.of_kind(ModuleKind.ENCODER):  # one that holds less limits no other
        held[m.name] = np.minimum(wanted[m.name], most.get(m.name, int(vector[0])))
    return InFlight(held, wanted, most)


def evenly(wanted: I64, caps: I64) -> I64:
    """What the stages hold at most: no more than wanted or than fits, never rising, and falling as evenly as it can.

    A stage that holds as many microbatches as the next one cannot send it a forward before that one has returned a
    backward, so the two take turns. Among several such stages in a row all take turns; spread evenly, only pairs do. On
    8 equal stages 5, 5, 4, 4, 3, 2, 2, 1 in flight take 69 passes for 32 microbatches, 5, 5, 5, 5, 4, 3, 2, 1 take 120.
    """
    held, count = wanted.copy(), len(wanted)
    for stage, cap in enumerate(caps.tolist()):
        if held[stage] > cap:
            behind = np.arange(count - stage, 0, -1)
            held[stage:] = np.minimum(held[stage:], -(-cap * behind // (count - stage)))
    return held


def _interleaved(execution: Execution, num_microbatches: int, units: Units) -> InFlight | None:
    """The backbone counts passes of a microbatch through one chunk, the others count microbatches."""
    extra = 2 if execution.of_kind(ModuleKind.GENERATOR) else 0  # one stage more for gradients to come back from
    backbone, chunks = execution.backbone, pipeline_layout(execution).chunks
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
        need = {m.name: ahead if m.kind is ModuleKind.ENCODER else 1 for m in outer}
        if top == first:
            more = {m.name: min(need[m.name] + (m.kind is ModuleKind.ENCODER), num_microbatches) for m in outer}
            wanted |= {name: np.array([number]) for name, number in more.items()}
        fits = backbone.memory is None or _fits(backbone, units[backbone.name], chunks, top)
        if fits and all(most.get(name, number) >= number for name, number in need.items()):
            held = {backbone.name: np.minimum(wanted[backbone.name], top)}
            for m in outer:
                held[m.name] = np.minimum(wanted[m.name], most.get(m.name, num_microbatches))
            return InFlight(held, wanted, most if backbone.memory is None else most | {backbone.name: top})
    return None


def too_small(execution: Execution, num_microbatches: int, units: Units) -> ModuleSpec:
    """The module whose memory does not hold what even the shortest interleaved lists need (`in_flight` is None)."""
    backbone, chunks = execution.backbone, pipeline_layout(execution).chunks
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
    taken = returned = most = 0
    for operation in interleaved_operations(0, pp, chunks, num_microbatches, passes):
        if operation.chunk == 0 and operation.kind is OperationKind.FORWARD:
            taken += 1
        elif operation.chunk == 0:
            most = max(most, taken - returned)
            returned += 1
    return most


def _fits(module: ModuleSpec, units: I64, chunks: int, passes: int) -> bool:
    """Whether memory holds what so many passes in flight need at their peak, on every rank."""
    if module.memory is None:
        return True
    held = interleaved_passes(module.memory, units, chunks)
    operations = interleaved_operations(0, module.pp, chunks, units.shape[1], passes)
    sign = np.array([1 if o.kind is OperationKind.FORWARD else -1 for o in operations], np.int64)
    changes: I64 = held[:, [o.chunk for o in operations], [o.microbatch for o in operations]] * sign
    return int(changes.cumsum(axis=1).max(initial=0)) <= module.memory.room_bytes


def decisions(execution: Execution, found: InFlight) -> tuple[Decision, ...]:
    """Why every module holds as many microbatches as it does."""
    layout, made = pipeline_layout(execution), []
    for m in execution.modules:
        held, wanted = found.held[m.name], found.wanted[m.name]
        counted = "passes " if m.kind is ModuleKind.BACKBONE and layout.chunks > 1 else ""
        item = "tokens" if m.kind is ModuleKind.BACKBONE else "patches"
        reason = f"{layout.schedule} asks for {listed(wanted)}"
        if m.memory is not None and m.name in found.most:
            enough = found.most[m.name] >= int(wanted.max())
            reason += (
                f", and memory for {m.memory.units:,} {item} holds them"
                if enough
                else f"; memory for {m.memory.units:,} {item} holds {found.most[m.name]}"
            )
        if (held < np.minimum(wanted, found.most.get(m.name, int(wanted.max())))).any():
            reason += "; falls evenly to what the last stage holds, so that few neighbours wait for each other"
        made.append(Decision(m.name, f"{counted}in flight: {listed(held)}", reason))
    return tuple(made)
