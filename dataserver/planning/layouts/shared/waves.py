"""Layouts that work wave by wave: how many microbatches every stage holds, within memory, and its program."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.job.fields import ModuleKind, Schedule, WaveOptions
from dataserver.planning.job.spec import Execution
from dataserver.planning.plan.naming import listed, unit_of
from dataserver.planning.plan.plan import Decision, ModuleSchedule
from dataserver.planning.simulation import Operations, Program, stage_operations, whole_step

EXTRAS = (0, 1, 2, 4, 8)
"""Numbers of microbatches in flight beyond those of the schedule that are tried, up to a job's limit: the same for all
jobs, so that a larger limit is never slower."""

FEWER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of microbatches in flight that are tried where memory holds more: less of it may be faster."""

AUTOMATIC_EXTRA = 4
"""Microbatches beyond those of 1F1B that are tried where the job leaves it open and every module states its memory."""

Units = Mapping[str, I64]
"""For each memory-limited module int64 [ranks, microbatches]: the patches or tokens of each microbatch
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
    chunks: Mapping[str, int] = field(default_factory=dict)
    """Model chunks of a stage of those modules that have several; they hold passes through one chunk."""
    at_most: int | None = None
    """What modules that state memory hold at most, where memory holds more."""

    @property
    def is_short(self) -> bool:
        """Whether some stage holds less than the schedule asks for."""
        return any((held < self.wanted[name]).any() for name, held in self.held.items())

    def schedules(self, execution: Execution) -> tuple[ModuleSchedule, ...]:
        """One for each module, in the order of the job."""
        return tuple(
            ModuleSchedule(m.name, self.held[m.name], chunks=self.chunks.get(m.name, 1)) for m in execution.modules
        )


def extras(execution: Execution) -> tuple[int, ...]:
    """Numbers of microbatches beyond those of the schedule that are worth a comparison."""
    layout = execution.options(WaveOptions)
    if layout.schedule is not Schedule.ONE_F_ONE_B:
        return (0,)
    most = layout.extra_in_flight
    if most is None:
        most = AUTOMATIC_EXTRA if all(m.memory is not None for m in execution.modules) else 0
    return tuple(extra for extra in EXTRAS if extra <= most)


def in_flight(
    execution: Execution, num_microbatches: int, extra: int, units: Units, at_most: int | None = None
) -> InFlight:
    """What every stage of one chunk holds: no more than fits its memory, than wanted, or than the stage before.

    With `at_most` modules that state memory hold no more than they would with less of it. Modules that run no backward
    hold one microbatch at a time, and limit no other: they send without waiting.
    """
    places = execution.depths
    num_stages = 1 + max(int(place.max()) for place in places.values())
    if execution.options(WaveOptions).schedule is Schedule.GPIPE:
        vector = np.full(num_stages, num_microbatches)  # all forwards, then all backwards: every one is in flight
    else:
        vector = one_f_one_b_in_flight(num_stages, extra)
    one = np.ones_like(vector)
    wanted = {m.name: (vector if m.runs_backward else one)[places[m.name]] for m in execution.modules}
    most = {
        m.name: most_in_flight(units[m.name], m.memory.units, int(wanted[m.name].max()))
        for m in execution.modules
        if m.memory is not None and m.name in units
    }
    caps, limits = vector.copy(), {n: most[n] if at_most is None else min(most[n], at_most) for n in most}
    for name, number in limits.items():
        if execution.module(name).runs_backward:
            caps[places[name]] = np.minimum(caps[places[name]], number)
    even = evenly(vector, caps)
    held = {m.name: (even if m.runs_backward else one)[places[m.name]] for m in execution.modules}
    beside = () if execution.identity_routing else execution.of_kind(ModuleKind.ENCODER)
    for m in beside:  # one that holds less limits no other
        held[m.name] = np.minimum(wanted[m.name], limits.get(m.name, int(vector[0])))
    return InFlight(held, wanted, most, at_most=at_most)


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


def one_f_one_b_in_flight(num_stages: int, extra: int = 0) -> I64:
    """Microbatches that each stage holds under 1F1B, int64 [stages]: one on the last stage, one more on each before.

    With `extra`, every stage but the last holds as many more: that smooths over microbatches of unequal size and costs
    their activations. The last stage always runs a backward as soon as it can, or all others would wait for it.
    Queues of 1 + `extra` waves between neighbours never deadlock.
    """
    held = np.arange(num_stages, 0, -1)
    held[:-1] += extra
    return held


def most_in_flight(units: I64, budget: int, wanted: int) -> int:
    """Consecutive microbatches, at most `wanted` and at least 1, that no rank ever lacks the room for.

    Args:
        units: int64 [ranks, microbatches], as of `held_units`.
        budget: units that a device holds.
        wanted: at least 1.
    """
    sums = np.concatenate([np.zeros((len(units), 1), np.int64), np.cumsum(units, axis=1)], axis=1)
    for number in range(min(wanted, units.shape[1]), 1, -1):
        yield_point()
        if int((sums[:, number:] - sums[:, :-number]).max(initial=0)) <= budget:
            return wanted if number == units.shape[1] else number
    return 1


def decisions(execution: Execution, found: InFlight) -> tuple[Decision, ...]:
    """Why every module holds as many microbatches as it does."""
    schedule, made = execution.options(WaveOptions).schedule, []
    for m in execution.modules:
        held, wanted = found.held[m.name], found.wanted[m.name]
        counted = "passes " if found.chunks.get(m.name, 1) > 1 else ""
        reason = f"{schedule} asks for {listed(wanted)}" if m.runs_backward else "it is frozen and runs no backward"
        if m.runs_backward and m.memory is not None and m.name in found.most:
            enough = found.most[m.name] >= int(wanted.max())
            reason += (
                f", and memory for {m.memory.units:,} {unit_of(m)} holds them"
                if enough
                else f"; memory for {m.memory.units:,} {unit_of(m)} holds {found.most[m.name]}"
            )
        if found.at_most is not None and m.name in found.most:
            reason += f"; with at most {found.at_most} the step is faster than with more"
        elif (held < np.minimum(wanted, found.most.get(m.name, int(wanted.max())))).any():
            reason += "; the number falls evenly towards the last stage, so that few neighbours wait for each other"
        made.append(Decision(m.name, f"{counted}in flight: {listed(held)}", reason))
    return tuple(made)


def wave_programs(
    execution: Execution, schedules: Sequence[ModuleSchedule], num_microbatches: int
) -> tuple[Program, ...]:
    """The programs of stages of single chunks, in the order of the joined pipeline."""
    held = {s.module: s.in_flight.tolist() for s in schedules}
    return tuple(
        Program((m.name,), stage, _done_by(held[m.name][stage], num_microbatches, m.runs_backward, not m.frozen))
        for m in execution.by_depth
        for stage in range(m.pp)
    )


@functools.lru_cache(maxsize=256)  # a plan makes them for each stage of each candidate
def _done_by(in_flight: int, num_microbatches: int, runs_backward: bool, trained: bool) -> Operations:
    return whole_step(stage_operations(in_flight, num_microbatches), runs_backward=runs_backward, trained=trained)
