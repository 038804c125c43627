"""Kernels over pipelines: the makespan of one component, and the search for a placement."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64, U64
from dataserver.planning.kernels.arrays import first_largest, largest
from dataserver.planning.kernels.compiler import inlined_part, kernel, part
from dataserver.planning.kernels.components import (
    Costs,
    Slots,
    excess,
    exchange,
    exchange_keeps_parity,
    fill,
    move,
    move_keeps_parity,
    slots_of,
)


class Clocks(NamedTuple):
    """Scratch of a simulation, nanoseconds: a column for each backbone stage, then each encoder, then each generator.
    Encoders and generators have one node in a component and use row 0; encoders that run on the first stage use its
    column."""

    now: I64
    """int64 [ranks of a component, columns]: when each node is free again."""
    ends: I64
    """int64 [ranks of a component, columns, waves]: end of every backward."""


@part
def component_makespan(time: I64, first: int, costs: Costs, clocks: Clocks) -> int:
    """Makespan of one component: c backbone ranks that share one node of each encoder and of each generator.

    Operations are visited round by round: in round k every stage runs the forward of wave k and then the backward that
    its list has behind it (`simulation.stage_operations`), first stages first and last stages first. So every input is
    known when it is needed and nothing is queued. A rank that has nothing in an encoder or generator does not wait for
    it. Products with `percent`, at most 1000, stay in int64 while a wave takes under 100 days.

    Args:
        time: int64 [rows, ranks, waves], see `components.Slots`.
        first: the component's first rank.
        costs: of the problem.
        clocks: scratch.
    """
    encoders = costs.encoders
    if _is_alone(costs):
        return _alone_makespan(time, first, costs, clocks.ends)
    last = first + costs.ranks_per_component
    before, backbone, behind = time[:encoders], time[encoders, first:last], time[encoders + 1 :]
    in_flight, percent, base, transfer, transfer_back = (
        costs.in_flight,
        costs.percent,
        costs.base,
        costs.transfer,
        costs.transfer_back,
    )
    stages, waves = len(in_flight) - len(before) - len(behind), time.shape[2]
    of_stages, of_behind = in_flight[encoders : encoders + stages], in_flight[encoders + stages :]
    now, ends = clocks.now, clocks.ends
    now[:] = 0
    for turn in range(waves + largest(in_flight) - 1):
        if turn < waves:
            _forward(before, backbone, behind, first, turn, base, transfer, stages, costs.whole, now)
        for g in range(len(behind)):
            wave = turn + 1 - of_behind[g]  # with f in flight, the backward behind forward k is that of wave k + 1 - f
            if 0 <= wave < waves:
                column, row = stages + encoders + g, encoders + 1 + g
                total = base[row]
                for i in range(len(backbone)):
                    total += behind[g, first + i, wave]
                now[0, column] += total * percent[row] // 100
                ends[0, column, wave] = now[0, column]
        _backward(backbone, behind, first, turn, percent[encoders], transfer_back, of_stages, encoders, now, ends)
        for row in range(encoders):
            wave = turn + 1 - in_flight[row]
            if 0 <= wave < waves:
                column = 0 if costs.whole else stages + row
                clock, total = now[0, column], base[row]
                for i in range(len(backbone)):
                    total += before[row, first + i, wave]
                    clock = max(clock, ends[i, 0, wave] + transfer_back[row] if before[row, first + i, wave] else 0)
                now[0, column] = clock + total * percent[row] // 100
    end = 0
    for i in range(len(now)):
        end = max(end, largest(now[i]))
    return end


@inlined_part
def _is_alone(costs: Costs) -> bool:
    """Whether a component is one stage of the backbone on one rank, with an encoder and a generator at most."""
    nodes = len(costs.base)
    alone = costs.ranks_per_component == 1 and len(costs.in_flight) == nodes and not costs.whole
    return bool(alone and costs.encoders <= 1 and nodes - costs.encoders <= 2)


@inlined_part
def _alone_makespan(time: I64, rank: int, costs: Costs, ends: I64) -> int:
    """`component_makespan` of such a component, with all clocks in registers: in three fifths of the time."""
    backbone, waves = costs.encoders, time.shape[2]
    encodes, generates = costs.encoders == 1, len(time) > backbone + 1
    base, percent, in_flight = costs.base, costs.percent, costs.in_flight
    encoded = clock = generated = 0
    for turn in range(waves + largest(in_flight) - 1):
        if turn < waves:
            begin = clock
            if encodes:
                work = time[0, rank, turn]
                encoded += base[0] + work
                begin = max(begin, encoded + costs.transfer[0] if work else 0)
            clock = begin + time[backbone, rank, turn]
            if generates:
                work = time[backbone + 1, rank, turn]
                generated = (
                    max(generated, clock + costs.transfer[backbone + 1] if work else 0) + base[backbone + 1] + work
                )
        if generates:
            wave = turn + 1 - in_flight[backbone + 1]
            if 0 <= wave < waves:
                generated += (base[backbone + 1] + time[backbone + 1, rank, wave]) * percent[backbone + 1] // 100
                ends[0, 1 + backbone, wave] = generated
        wave = turn + 1 - in_flight[backbone]
        if 0 <= wave < waves:
            if generates and time[backbone + 1, rank, wave]:
                clock = max(clock, ends[0, 1 + backbone, wave] + costs.transfer_back[backbone + 1])
            clock += time[backbone, rank, wave] * percent[backbone] // 100
            ends[0, 0, wave] = clock
        if encodes:
            wave = turn + 1 - in_flight[0]
            if 0 <= wave < waves:
                work = time[0, rank, wave]
                encoded = max(encoded, ends[0, 0, wave] + costs.transfer_back[0] if work else 0)
                encoded += (base[0] + work) * percent[0] // 100
    return max(encoded, clock, generated)


@inlined_part
def _forward(
    before: I64,
    backbone: I64,
    behind: I64,
    first: int,
    wave: int,
    base: I64,
    transfer: I64,
    stages: int,
    whole: bool,
    now: I64,
) -> None:
    """The forward of one wave in all stages."""
    ranks, encoders, generators = len(backbone), len(before), len(behind)
    between = transfer[encoders]
    for row in range(encoders):
        column = 0 if whole else stages + row
        clock = now[0, column] + base[row]
        for i in range(ranks):
            clock += before[row, first + i, wave]
        now[0, column] = clock
    for i in range(ranks):
        clock = 0
        for row in range(encoders):
            clock = max(clock, now[0, stages + row] + transfer[row] if before[row, first + i, wave] else 0)
        step = backbone[i, wave]
        clock -= between
        for s in range(stages):
            clock = max(clock + (between + step), now[i, s] + step)  # two instructions deep from stage to stage
            now[i, s] = clock
        for g in range(generators):
            now[0, stages + encoders + g] = max(
                now[0, stages + encoders + g], clock + transfer[encoders + 1 + g] if behind[g, first + i, wave] else 0
            )
    for g in range(generators):
        clock = now[0, stages + encoders + g] + base[encoders + 1 + g]
        for i in range(ranks):
            clock += behind[g, first + i, wave]
        now[0, stages + encoders + g] = clock


@inlined_part
def _backward(
    backbone: I64,
    behind: I64,
    first: int,
    turn: int,
    percent: int,
    transfer_back: I64,
    of_stages: I64,
    encoders: int,
    now: I64,
    ends: I64,
) -> None:
    """The backward of each backbone stage behind the forward of wave `turn`, or in its place when none is left."""
    stages, waves, between = len(of_stages), backbone.shape[1], transfer_back[encoders]
    for i in range(len(backbone)):
        for s in range(stages - 1, -1, -1):
            wave = turn + 1 - of_stages[s]
            if wave < 0 or wave >= waves:
                continue
            clock = now[i, s]
            if s + 1 < stages:
                clock = max(clock, ends[i, s + 1, wave] + between)
            else:
                for g in range(len(behind)):
                    returned = ends[0, stages + encoders + g, wave] + transfer_back[encoders + 1 + g]
                    clock = max(clock, returned if behind[g, first + i, wave] else 0)
            clock += backbone[i, wave] * percent // 100
            now[i, s] = clock
            ends[i, s, wave] = clock


class Climb(NamedTuple):
    """Hill climbing on the slowest component: swaps of its sequences, within it or with another; moves of microbatches.

    A change is kept if the slowest component becomes no slower and the other one either no slower or, where that makes
    the slowest faster, not as slow as it was, and all that it touches keeps within the memory. Exchanges that cannot
    help are not simulated. Deterministic: the n-th trial is given by the n-th word, and the search ends after `budget`
    simulated components, when the words are used up, or when the slowest component takes no longer than `goal_ns`.
    This is its state between two calls of `go_on`.
    """

    slots: Slots
    """The placement, which is changed; within the memory."""
    costs: Costs
    """Costs of the problem whose placement is searched."""
    clocks: Clocks
    """Clocks of one simulated component, reused by the next."""
    makespan: I64
    """int64 [components]: of each component, nanoseconds; -1 where it was not simulated yet, as all are at first."""

    @property
    def is_ready(self) -> bool:
        """Whether all components were simulated, so that trials can begin."""
        return bool(self.makespan[-1] >= 0)

    @property
    def makespan_ns(self) -> int:
        """Of the slowest component; only where the climb is ready."""
        return int(self.makespan.max())


def climb_of(at: I64, costs: Costs) -> Climb:
    """A climb that has not begun.

    `at`, int64 [ranks, waves, slots], is changed in place: the sequence in each slot, -1 for none; within the memory.
    """
    ranks, waves, _ = at.shape
    per_component, columns = costs.ranks_per_component, len(costs.in_flight)
    clocks = Clocks(np.empty((per_component, columns), np.int64), np.zeros((per_component, columns, waves), np.int64))
    return Climb(slots_of(at, costs), costs, clocks, np.full(ranks // per_component, -1, np.int64))


def go_on(climb: Climb, words: U64, budget: int, goal_ns: int = -1) -> tuple[int, int]:
    """Simulate components that were not simulated yet, the first ones first, then try what the words say.

    Args:
        climb: the state, changed in place.
        words: uint64 [trials], random; none as long as the climb is not ready.
        budget: components to simulate.
        goal_ns: time of the slowest component that is enough; -1 for none.

    Returns:
        Components that were simulated, which may be one more; words that were used.
    """
    simulated, used = _climb(*climb, words, budget, goal_ns)
    return simulated, used


@kernel
def _climb(
    slots: Slots, costs: Costs, clocks: Clocks, makespan: I64, words: U64, budget: int, goal_ns: int
) -> tuple[int, int]:
    per_component, simulated, used = costs.ranks_per_component, 0, 0
    if makespan[0] < 0:
        fill(slots, costs)
    for component in range(len(makespan)):
        if makespan[component] < 0 and simulated < budget:
            makespan[component] = component_makespan(slots.time, component * per_component, costs, clocks)
            simulated += 1
    for word in words:
        worst = first_largest(makespan)
        if simulated >= budget or makespan[worst] <= goal_ns:
            break
        used += 1
        kind, rank, first, slot, other, second, other_slot = _trial(word, per_component, slots.at.shape)
        rank += worst * per_component
        if kind < 3:
            simulated += _try_move(slots, costs, clocks, makespan, rank, first, second, kind < 2)
        else:
            simulated += _try_exchange(slots, costs, clocks, makespan, rank, first, slot, other, second, other_slot)
    return simulated, used


@inlined_part
def _trial(
    word: int, ranks_per_component: int, shape: tuple[int, int, int]
) -> tuple[int, int, int, int, int, int, int]:
    """What a word says: a kind, a rank of the component, microbatch and slot; another rank, microbatch and slot.

    Of eight kinds 0 and 1 shift microbatches, 2 exchanges two, the others exchange sequences. A quarter of the trials
    are at the first or last microbatch, on which all stages wait.
    """
    ranks, waves, slots = shape
    # Digits in mixed radix, from the low end; without the top bit the word is a non-negative int64.
    bits = int(np.int64(word >> np.uint64(1)))
    rank = bits % ranks_per_component
    bits //= ranks_per_component
    first = bits % waves
    bits //= waves
    second = bits % waves
    bits //= waves
    kind = bits % 8
    bits //= 8
    edge = bits % 8
    bits //= 8
    if edge < 2:
        first = edge * (waves - 1)
    other = bits % ranks
    bits //= ranks
    return kind, rank, first, bits % slots, other, second, bits // slots % slots


@inlined_part
def _covers(costs: Costs, large: int, small: int) -> bool:
    """Whether one sequence costs as much as another or more everywhere: in its place no component becomes faster."""
    for row in range(len(costs.base)):
        if costs.own[row, large] < costs.own[row, small]:
            return False
    return not len(costs.items) or costs.items[large] >= costs.items[small]


@inlined_part
def _try_move(
    slots: Slots, costs: Costs, clocks: Clocks, makespan: I64, rank: int, first: int, second: int, shift: bool
) -> int:
    """Move a microbatch of the slowest component if that does not slow it down; the components simulated."""
    if first == second:
        return 0
    if not move_keeps_parity(slots, costs, rank, first, second, shift):
        return 1
    per_component = costs.ranks_per_component
    component = rank // per_component
    move(slots, rank, first, second, shift)
    if excess(slots, costs, rank, min(first, second), max(first, second)):
        move(slots, rank, second, first, shift)
        return 1
    now = component_makespan(slots.time, component * per_component, costs, clocks)
    if now <= makespan[component]:
        makespan[component] = now
    else:
        move(slots, rank, second, first, shift)
    return 1


@inlined_part
def _try_exchange(
    slots: Slots,
    costs: Costs,
    clocks: Clocks,
    makespan: I64,
    rank: int,
    wave: int,
    slot: int,
    other: int,
    other_wave: int,
    other_slot: int,
) -> int:
    """Exchange two slots, the first of the slowest component, if that slows nothing down; the components simulated."""
    if rank == other and wave == other_wave:
        return 0
    if not exchange_keeps_parity(slots, costs, rank, wave, slot, other, other_wave, other_slot):
        return 1
    per_component = costs.ranks_per_component
    worst, component = rank // per_component, other // per_component
    if component != worst and _covers(costs, slots.at[other, other_wave, other_slot], slots.at[rank, wave, slot]):
        return 0
    exchange(slots, costs, rank, wave, slot, other, other_wave, other_slot)
    if excess(slots, costs, rank, wave, wave) or excess(slots, costs, other, other_wave, other_wave):
        exchange(slots, costs, rank, wave, slot, other, other_wave, other_slot)
        return 1
    simulated = 1
    now = component_makespan(slots.time, worst * per_component, costs, clocks)
    there = now
    if now <= makespan[worst] and component != worst:
        there = component_makespan(slots.time, component * per_component, costs, clocks)
        simulated = 2
    if now <= makespan[worst] and (there <= makespan[component] or max(now, there) < makespan[worst]):
        makespan[worst], makespan[component] = now, there
    else:
        exchange(slots, costs, rank, wave, slot, other, other_wave, other_slot)
    return simulated
