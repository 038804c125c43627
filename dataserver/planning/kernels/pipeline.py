"""Kernels over pipelines: the search for a placement."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64, U64
from dataserver.planning.kernels.arrays import copy_to, largest
from dataserver.planning.kernels.clocks import SLOWER, Clocks, clocks_of, component_makespan
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
    spent, everywhere = np.zeros((1, 2), np.int64), np.arange(len(climb.makespan))[None]
    _climb(*climb, everywhere, words[None], budget, goal_ns, spent)
    return int(spent[0, 0]), int(spent[0, 1])


def go_on_in(climb: Climb, groups: I64, words: U64, budget: int, goal_ns: int) -> tuple[int, int]:
    """Let some components exchange with each other alone, those of each group: the same for whatever other threads do
    with other groups meanwhile.

    Args:
        climb: the state, which is ready; changed in place where the groups are.
        groups: int64 [groups, components of each]; none of them twice.
        words: uint64 [groups, trials].
        budget: components to simulate for each group.
        goal_ns: time of a group's slowest component that is enough.

    Returns:
        The same as `go_on`, of all groups.
    """
    spent = np.zeros((len(groups), 2), np.int64)
    mine = climb._replace(tried=clocks_of(climb.costs, climb.slots.at.shape[1], 2))
    _climb(*mine, groups, words, budget, goal_ns, spent)
    return int(spent[:, 0].sum()), int(spent[:, 1].sum())


@kernel
def _climb(
    slots: Slots, costs: Costs, clocks: Clocks, tried: Clocks, makespan: I64, groups: I64, words: U64, budget: int,
    goal_ns: int, spent: I64,
) -> None:  # fmt: skip
    """Go on in each group of components; `spent` is int64 [groups, 2]: what `go_on` returns."""
    per_component, waves = costs.ranks_per_component, slots.at.shape[1]
    if makespan[0] < 0:
        fill(slots, costs)
    for component in range(len(makespan)):
        if makespan[component] < 0 and spent[0, 0] < budget:
            own = Clocks(clocks.now[component], clocks.ends[component])
            makespan[component], _ = component_makespan(
                slots.time, component * per_component, costs, own, 0, waves + largest(costs.in_flight), own, 0
            )
            spent[0, 0] += 1
    for group in range(len(groups)):
        mine, simulated, used = groups[group], spent[group, 0], 0
        for word in words[group]:
            worst = _slowest(makespan, mine)
            if simulated >= budget or makespan[worst] <= goal_ns:
                break
            used += 1
            kind, rank, first, slot, other, second, other_slot = _trial(
                word, per_component, len(mine) * per_component, waves, slots.at.shape[2]
            )
            rank += worst * per_component
            if kind < 3:
                simulated += _try_move(slots, costs, clocks, tried, makespan, rank, first, second, kind < 2)
            else:
                other = mine[other // per_component] * per_component + other % per_component
                simulated += _try_exchange(
                    slots, costs, clocks, tried, makespan, rank, first, slot, other, second, other_slot
                )
        spent[group, 0], spent[group, 1] = simulated, used


@inlined_part
def _slowest(makespan: I64, mine: I64) -> int:
    """The slowest of some components, the first of several."""
    found = mine[0]
    for component in mine:
        if makespan[component] > makespan[found]:
            found = component
    return int(found)


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
    word: int, ranks_per_component: int, ranks: int, waves: int, slots: int
) -> tuple[int, int, int, int, int, int, int]:
    """What a word says: a kind, a rank of the component, microbatch and slot; one of so many ranks, and the same there.

    Of eight kinds 0 and 1 shift microbatches, 2 exchanges two, the others exchange sequences. A quarter of the trials
    are at the first or last microbatch, on which all stages wait.
    """
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
