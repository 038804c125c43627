"""Kernels over pipelines: the makespan of one component, and the search for a placement."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64, U64
from dataserver.planning.kernels.arrays import copy_to, first_largest, largest
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

AS_BEFORE, SLOWER = -1, -2
"""What `component_makespan` finds where a change has no effect any more, and where it is too slow to go on."""


class Clocks(NamedTuple):
    """How a simulation of a component went, nanoseconds: a column for each backbone stage, then each encoder, then each
    generator. Encoders and generators have one node in a component and use row 0; encoders that run on the first stage
    use its column."""

    now: I64
    """int64 [turns + 1, ranks of a component, columns]: when each node is free before each turn, and at the end. With f
    microbatches in flight the backward of wave k is the last thing that a node does in turn k + f - 1."""
    ends: I64
    """int64 [ranks of a component, waves]: end of every backward of the first stage."""


def clocks_of(costs: Costs, waves: int, count: int) -> Clocks:
    """Times of so many simulations: both arrays have one dimension more. Not compiled."""
    ranks, columns = costs.ranks_per_component, len(costs.in_flight)
    turns = waves + int(costs.in_flight.max()) - 1
    return Clocks(np.zeros((count, turns + 1, ranks, columns), np.int64), np.zeros((count, ranks, waves), np.int64))


@part
def component_makespan(
    time: I64, first: int, costs: Costs, clocks: Clocks, begin: int, last: int, before: Clocks, margin: int
) -> tuple[int, int]:
    """Makespan of one component: c backbone ranks that share one node of each encoder and of each generator.

    Operations are visited round by round: in turn k every stage runs the forward of wave k and then the backward that
    its list has behind it (`simulation.stage_operations`), first stages first and last stages first. So every input is
    known when it is needed and nothing is queued. A rank that has nothing in an encoder or generator does not wait for
    it. Products with `percent`, at most 1000, stay in int64 while a wave takes under 100 days.

    Args:
        time: int64 [rows, ranks, waves], see `components.Slots`.
        first: the component's first rank.
        costs: of the problem.
        clocks: of this simulation; what comes before the turn `begin` is there, the rest is written.
        begin: where to begin.
        last: the last wave whose times are others than in `before`; as many as there are waves for no comparison.
        before: clocks of a whole simulation. Once those of all nodes have been the same for as many turns as there are
            microbatches in flight, so is all that follows; or later by as much, if all of them have been.
        margin: nanoseconds by which the makespan may be longer than there.

    Returns:
        The makespan, `AS_BEFORE`, or `SLOWER` than the margin allows; and the turn before which the simulation ended.
    """
    encoders = costs.encoders
    end = first + costs.ranks_per_component
    rows, backbone, behind = time[:encoders], time[encoders, first:end], time[encoders + 1 :]
    in_flight, percent, base, transfer, transfer_back = (
        costs.in_flight,
        costs.percent,
        costs.base,
        costs.transfer,
        costs.transfer_back,
    )
    stages, waves, most = len(in_flight) - len(rows) - len(behind), time.shape[2], largest(in_flight)
    of_stages, of_behind = in_flight[encoders : encoders + stages], in_flight[encoders + stages :]
    ends, turns, same, later = clocks.ends, waves + most - 1, 0, 0
    for turn in range(begin, turns):
        now = clocks.now[turn + 1]
        if turn < waves:
            _forward(rows, backbone, behind, first, turn, base, transfer, stages, costs.whole, clocks.now[turn], now)
        else:
            for i in range(len(now)):
                copy_to(now[i], clocks.now[turn, i])
        for g in range(len(behind)):
            wave = turn + 1 - of_behind[g]  # with f in flight, the backward behind forward k is that of wave k + 1 - f
            if 0 <= wave < waves:
                column, row = stages + encoders + g, encoders + 1 + g
                total = base[row]
                for i in range(len(backbone)):
                    total += behind[g, first + i, wave]
                now[0, column] += total * percent[row] // 100
        _backward(
            backbone, behind, first, turn, percent[encoders], transfer_back, of_stages, of_behind, encoders, clocks
        )
        for row in range(encoders):
            wave = turn + 1 - in_flight[row]
            if 0 <= wave < waves:
                column = 0 if costs.whole else stages + row
                clock, total = now[0, column], base[row]
                for i in range(len(backbone)):
                    total += rows[row, first + i, wave]
                    clock = max(clock, ends[i, wave] + transfer_back[row] if rows[row, first + i, wave] else 0)
                now[0, column] = clock + total * percent[row] // 100
        if turn >= last:
            least, longest = _later(now, before.now[turn + 1], stages, stages + encoders if costs.whole else stages)
            same = same + 1 if least == longest == 0 else 0
            later = later + 1 if least > margin else 0
            if max(same, later) >= most and turn >= last + most:
                return AS_BEFORE if same else SLOWER, turn + 1
    makespan = 0
    for i in range(costs.ranks_per_component):
        makespan = max(makespan, largest(clocks.now[turns, i]))
    return makespan, turns


@inlined_part
def _later(now: I64, before: I64, stages: int, others: int) -> tuple[int, int]:
    """By how much the clocks of all nodes are later than before, the least and the most; those of encoders and
    generators begin at a column of the first row."""
    least = longest = now[0, 0] - before[0, 0]
    for i in range(len(now)):
        for column in range(stages):
            by = now[i, column] - before[i, column]
            least, longest = min(least, by), max(longest, by)
    for column in range(others, now.shape[1]):
        by = now[0, column] - before[0, column]
        least, longest = min(least, by), max(longest, by)
    return least, longest


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
    was: I64,
    now: I64,
) -> None:
    """The forward of one wave in all stages, whose nodes are free at `was`; `now` is when they are free behind it."""
    ranks, encoders, generators = len(backbone), len(before), len(behind)
    between, alone = transfer[encoders], was[0, 0]
    for row in range(encoders):
        column = 0 if whole else stages + row
        clock = (alone if whole else was[0, column]) + base[row]
        for i in range(ranks):
            clock += before[row, first + i, wave]
        if whole:
            alone = clock
        else:
            now[0, column] = clock
    for i in range(ranks):
        clock = 0
        for row in range(encoders):
            clock = max(clock, now[0, stages + row] + transfer[row] if before[row, first + i, wave] else 0)
        step = backbone[i, wave]
        clock = max(clock, alone if whole else was[i, 0]) + step
        now[i, 0] = clock
        for s in range(1, stages):
            clock = max(clock + (between + step), was[i, s] + step)  # two instructions deep from stage to stage
            now[i, s] = clock
    for g in range(generators):
        column = stages + encoders + g
        clock = was[0, column]
        for i in range(ranks):
            given = now[i, stages - 1] + transfer[encoders + 1 + g]
            clock = max(clock, given if behind[g, first + i, wave] else 0)
        clock += base[encoders + 1 + g]
        for i in range(ranks):
            clock += behind[g, first + i, wave]
        now[0, column] = clock


@inlined_part
def _backward(
    backbone: I64,
    behind: I64,
    first: int,
    turn: int,
    percent: int,
    transfer_back: I64,
    of_stages: I64,
    of_behind: I64,
    encoders: int,
    clocks: Clocks,
) -> None:
    """The backward of each backbone stage behind the forward of wave `turn`, or in its place when none is left."""
    stages, waves, between, now = len(of_stages), backbone.shape[1], transfer_back[encoders], clocks.now
    times = percent // 100 if percent % 100 == 0 else 0
    for i in range(len(backbone)):
        for s in range(stages - 1, -1, -1):
            wave = turn + 1 - of_stages[s]
            if wave < 0 or wave >= waves:
                continue
            clock = now[turn + 1, i, s]
            if s + 1 < stages:
                clock = max(clock, now[wave + of_stages[s + 1], i, s + 1] + between)
            else:
                for g in range(len(behind)):
                    returned = now[wave + of_behind[g], 0, stages + encoders + g] + transfer_back[encoders + 1 + g]
                    clock = max(clock, returned if behind[g, first + i, wave] else 0)
            clock += backbone[i, wave] * times if times else backbone[i, wave] * percent // 100
            now[turn + 1, i, s] = clock
            if s == 0:
                clocks.ends[i, wave] = clock


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
    """Times of each component as it is now."""
    tried: Clocks
    """Times of the two components of a trial."""
    makespan: I64
    """int64 [components]: of each component, nanoseconds; -1 where it was not simulated yet, as all are at first."""

    @property
    def is_ready(self) -> bool:
        """Whether all components were simulated, so that trials can begin."""
        return bool(self.makespan[-1] >= 0)

    @property
    def makespan_ns(self) -> int:
        """Time of the slowest component; only where the climb is ready."""
        return int(self.makespan.max())


def climb_of(at: I64, costs: Costs) -> Climb:
    """A climb that has not begun.

    `at`, int64 [ranks, waves, slots], is changed in place: the sequence in each slot, -1 for none; within the memory.
    """
    ranks, waves, _ = at.shape
    components = ranks // costs.ranks_per_component
    clocks, tried = (clocks_of(costs, waves, count) for count in (components, 2))
    return Climb(slots_of(at, costs), costs, clocks, tried, np.full(components, -1, np.int64))


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
    slots: Slots, costs: Costs, clocks: Clocks, tried: Clocks, makespan: I64, words: U64, budget: int, goal_ns: int
) -> tuple[int, int]:
    per_component, waves, simulated, used = costs.ranks_per_component, slots.at.shape[1], 0, 0
    if makespan[0] < 0:
        fill(slots, costs)
    for component in range(len(makespan)):
        if makespan[component] < 0 and simulated < budget:
            own = Clocks(clocks.now[component], clocks.ends[component])
            makespan[component], _ = component_makespan(
                slots.time, component * per_component, costs, own, 0, waves + largest(costs.in_flight), own, 0
            )
            simulated += 1
    for word in words:
        worst = first_largest(makespan)
        if simulated >= budget or makespan[worst] <= goal_ns:
            break
        used += 1
        kind, rank, first, slot, other, second, other_slot = _trial(word, per_component, slots.at.shape)
        rank += worst * per_component
        if kind < 3:
            simulated += _try_move(slots, costs, clocks, tried, makespan, rank, first, second, kind < 2)
        else:
            simulated += _try_exchange(
                slots, costs, clocks, tried, makespan, rank, first, slot, other, second, other_slot
            )
    return simulated, used


@inlined_part
def _reach(costs: Costs, columns: int) -> int:
    """How many turns back a backward of the backbone looks at most for the one whose gradients it takes, 1 at least."""
    reach, stages = 1, columns - (len(costs.base) - 1)
    for s in range(stages):
        behind = costs.in_flight[costs.encoders + s]
        if s + 1 < stages:
            reach = max(reach, behind - costs.in_flight[costs.encoders + s + 1])
        else:
            for g in range(costs.encoders + stages, columns):
                reach = max(reach, behind - costs.in_flight[g])
    return int(reach)


@part
def _changed_makespan(
    slots: Slots, costs: Costs, clocks: Clocks, tried: Clocks, makespan: I64, component: int, which: int, first: int,
    last: int, margin: int,
) -> tuple[int, int]:  # fmt: skip
    """The makespan of a component whose waves `first` to `last` changed, or one beyond the margin if it is longer
    than it was by more than that; and the turn before which its clocks are new.

    They are those of `which` of the two that are tried.
    """
    now, before = Clocks(tried.now[which], tried.ends[which]), Clocks(clocks.now[component], clocks.ends[component])
    for i in range(now.now.shape[1]):
        for turn in range(max(0, first + 1 - _reach(costs, clocks.now.shape[3])), first + 1):
            copy_to(now.now[turn, i], before.now[turn, i])
        for wave in range(max(0, first + 1 - largest(costs.in_flight)), first):
            now.ends[i, wave] = before.ends[i, wave]
    begin = component * costs.ranks_per_component
    found, until = component_makespan(slots.time, begin, costs, now, first, last, before, margin)
    if found < 0:
        found = makespan[component] + (margin + 1 if found == SLOWER else 0)
    return found, until


@part
def _keep(costs: Costs, clocks: Clocks, tried: Clocks, component: int, which: int, first: int, until: int) -> None:
    """Take over the clocks of a component that was tried, which are new from one turn until before another."""
    now, before = Clocks(tried.now[which], tried.ends[which]), Clocks(clocks.now[component], clocks.ends[component])
    waves, most = now.ends.shape[1], largest(costs.in_flight)
    last = waves if until == waves + most - 1 else until - most  # the others are as before, if they were written
    for i in range(now.now.shape[1]):
        for turn in range(first, until + 1):
            copy_to(before.now[turn, i], now.now[turn, i])
        for wave in range(max(0, first + 1 - most), last):
            before.ends[i, wave] = now.ends[i, wave]


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
    slots: Slots, costs: Costs, clocks: Clocks, tried: Clocks, makespan: I64, rank: int, first: int, second: int,
    shift: bool,
) -> int:  # fmt: skip
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
    low, high = min(first, second), max(first, second)
    now, until = _changed_makespan(slots, costs, clocks, tried, makespan, component, 0, low, high, 0)
    if now <= makespan[component]:
        makespan[component] = now
        _keep(costs, clocks, tried, component, 0, low, until)
    else:
        move(slots, rank, second, first, shift)
    return 1


@inlined_part
def _try_exchange(
    slots: Slots,
    costs: Costs,
    clocks: Clocks,
    tried: Clocks,
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
    simulated, within = 1, component == worst
    low, high = min(wave, other_wave) if within else wave, max(wave, other_wave) if within else wave
    now, until = _changed_makespan(slots, costs, clocks, tried, makespan, worst, 0, low, high, 0)
    there, there_until = now, until
    if now <= makespan[worst] and not within:
        margin = max(0, makespan[worst] - 1 - makespan[component]) if now < makespan[worst] else 0
        there, there_until = _changed_makespan(
            slots, costs, clocks, tried, makespan, component, 1, other_wave, other_wave, margin
        )
        simulated = 2
    if now <= makespan[worst] and (there <= makespan[component] or max(now, there) < makespan[worst]):
        makespan[worst], makespan[component] = now, there
        _keep(costs, clocks, tried, worst, 0, low, until)
        if not within:
            _keep(costs, clocks, tried, component, 1, other_wave, there_until)
    else:
        exchange(slots, costs, rank, wave, slot, other, other_wave, other_slot)
    return simulated
