"""Kernels over pipelines: the makespan of one component, by the clocks of its nodes."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64
from dataserver.planning.kernels.arrays import copy_to, largest
from dataserver.planning.kernels.compiler import inlined_part, part
from dataserver.planning.kernels.components import Costs

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
