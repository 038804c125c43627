"""Kernels of the search for placements, in plain Python: sums kept up to date against sums made anew, every trial of a
climb against what its word says."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from planning.kernels.interpreted import interpreted
from planning.kernels.test_golden_placements import problem_of

from dataserver.planning import I64, U64
from dataserver.planning.layouts.pipelined.placing import search

components, pipeline = interpreted("kernels.components"), interpreted("kernels.pipeline")
KINDS = [(padded, limited) for padded in (False, True) for limited in (False, True)]


def costs_and_slots(seed: int, padded: bool, limited: bool) -> tuple[Any, I64]:
    problem, placement = problem_of(seed, padded=padded, limited=limited)
    if limited:
        placement, _ = search.fitted(problem, placement)
    return search._costs(problem), search.in_slots(problem.shape, placement)


def summed(costs: Any, values: I64, row: int, held: list[int]) -> int:
    found = [int(values[row, s]) for s in held if s >= 0]
    if row == costs.encoders and len(costs.items):
        return int(sum(costs.items[s] for s in held if s >= 0)) * max(found, default=0)
    return sum(found)


def sums(costs: Any, at: I64) -> tuple[Any, Any]:
    """Times and memory of every microbatch, made anew."""
    ranks, waves, _ = at.shape
    rows, held = range(len(costs.base)), at.tolist()
    time = [[[summed(costs, costs.own, r, held[i][w]) for w in range(waves)] for i in range(ranks)] for r in rows]
    time[costs.encoders] = [[t + int(costs.base[costs.encoders]) for t in rank] for rank in time[costs.encoders]]
    limited = range(len(costs.budget))
    return time, [
        [[summed(costs, costs.need, r, held[i][w]) for w in range(waves)] for i in range(ranks)] for r in limited
    ]


def shortfall(costs: Any, used: Any, row: int, rank: int, first: int, last: int) -> int:
    """What the fullest window around some waves has beyond the budget."""
    if costs.budget[row] < 0:
        return 0
    begin = rank if row == costs.encoders else rank // costs.ranks_per_component * costs.ranks_per_component
    ranks = range(begin, begin + (1 if row == costs.encoders else costs.ranks_per_component))
    waves = len(used[row][0])
    size = min(int(costs.window[row]), waves)
    windows = [
        sum(used[row][r][k] for r in ranks for k in range(start, start + size))
        for start in range(waves - size + 1)
        if start <= last and start + size > first
    ]
    return max(0, max(windows) - int(costs.budget[row]))


@pytest.mark.parametrize(("padded", "limited"), KINDS)
def test_sums_stay_up_to_date_whatever_moves(padded: bool, limited: bool) -> None:
    random = np.random.default_rng(1)
    for seed in range(12):
        costs, at = costs_and_slots(seed, padded, limited)
        slots = components.slots_of(at, costs)
        components.fill(slots, costs)
        ranks, waves, places = at.shape
        for _ in range(15):
            time, used = sums(costs, at)
            assert slots.time.tolist() == time
            assert slots.used.tolist() == used
            rank, other = random.integers(0, ranks, 2).tolist()
            first, second = random.integers(0, waves, 2).tolist()
            low, high = sorted((first, second))
            for row in range(len(costs.budget)):
                assert components.excess_of(slots, costs, row, rank, low, high) == shortfall(
                    costs, used, row, rank, low, high
                )
            every = sum(shortfall(costs, used, row, rank, low, high) for row in range(len(costs.budget)))
            assert components.excess(slots, costs, rank, low, high) == every
            expected = at.tolist()
            if random.integers(0, 2):
                slot, other_slot = random.integers(0, places, 2).tolist()
                if (rank, first) != (other, second):
                    here, there = expected[rank][first][slot], expected[other][second][other_slot]
                    expected[rank][first][slot], expected[other][second][other_slot] = there, here
                    components.exchange(slots, costs, rank, first, slot, other, second, other_slot)
            elif shift := bool(random.integers(0, 2)):
                expected[rank].insert(second, expected[rank].pop(first))
                components.move(slots, rank, first, second, shift)
            else:
                row = expected[rank]
                row[first], row[second] = row[second], row[first]
                components.move(slots, rank, first, second, shift)
            assert at.tolist() == expected


@dataclass
class Climb:
    """Hill climbing that makes all sums anew for every trial."""

    costs: Any
    at: I64
    simulated: int = 0

    def __post_init__(self) -> None:
        self.before = self.makespans()

    def makespans(self) -> list[int]:
        ranks, waves, _ = self.at.shape
        each = self.costs.ranks_per_component
        time = np.array(sums(self.costs, self.at)[0], np.int64)
        found = []
        for component in range(ranks // each):
            clocks = pipeline.Clocks(*(a[0] for a in pipeline.clocks_of(self.costs, waves, 1)))
            begin = component * each
            found.append(pipeline.component_makespan(time, begin, self.costs, clocks, 0, 1 << 20, clocks, 0)[0])
        return found

    def fits(self) -> bool:
        ranks, waves, _ = self.at.shape
        used = sums(self.costs, self.at)[1]
        rows = range(len(self.costs.budget))
        return not any(shortfall(self.costs, used, row, rank, 0, waves - 1) for row in rows for rank in range(ranks))

    def covers(self, large: int, small: int) -> bool:
        rows = range(len(self.costs.base))
        return all(self.costs.own[r, large] >= self.costs.own[r, small] for r in rows) and (
            not len(self.costs.items) or bool(self.costs.items[large] >= self.costs.items[small])
        )

    def trial(self, word: int) -> None:
        ranks, waves, places = self.at.shape
        digits, rest = [], int(word) >> 1
        for radix in (self.costs.ranks_per_component, waves, waves, 8, 8, ranks, places, places):
            rest, digit = divmod(rest, radix)
            digits.append(digit)
        rank, first, second, kind, edge, other, slot, other_slot = digits
        now = self.makespans()
        worst = now.index(max(now))
        rank += worst * self.costs.ranks_per_component
        first = {0: 0, 1: waves - 1}.get(edge, first)
        saved = self.at.copy()
        if kind < 3:
            if first == second:
                return
            row = self.at[rank].tolist()
            if kind < 2:
                row.insert(second, row.pop(first))
            else:
                row[first], row[second] = row[second], row[first]
            self.at[rank] = row
            self.simulated += 1
            if not self.fits() or self.makespans()[worst] > now[worst]:
                self.at[:] = saved
            return
        here, there = self.at[rank, first, slot], self.at[other, second, other_slot]
        component = other // self.costs.ranks_per_component
        if (rank, first) == (other, second) or (component != worst and self.covers(there, here)):
            return
        self.at[rank, first, slot], self.at[other, second, other_slot] = there, here
        self.simulated += 1
        if not self.fits():
            self.at[:] = saved
            return
        after = self.makespans()
        self.simulated += after[worst] <= now[worst] and component != worst
        slower = after[component] > now[component] and max(after[worst], after[component]) >= now[worst]
        if after[worst] > now[worst] or slower:
            self.at[:] = saved


def improved(at: I64, costs: Any, words: U64, budget: int) -> tuple[int, int, int]:
    """The makespan before, components simulated and words used by a climb: one component, then one word at a time
    until it has used half of what it may."""
    climb, before, simulated, used = pipeline.climb_of(at, costs), 0, 0, 0
    while not climb.is_ready:
        assert pipeline.go_on(climb, words[:0], 1) == (1, 0)
    before = climb.makespan_ns
    while simulated < budget // 2 and used < len(words) // 2:
        more = pipeline.go_on(climb, words[used : used + 1], budget - simulated)
        simulated, used = simulated + more[0], used + more[1]
    more = pipeline.go_on(climb, words[used:], budget - simulated)
    return before, simulated + more[0], used + more[1]


@pytest.mark.parametrize(("padded", "limited"), KINDS)
def test_a_climb_keeps_what_slows_nothing_down(padded: bool, limited: bool) -> None:
    words = np.random.default_rng(5).integers(0, 1 << 63, 60, np.uint64) * np.uint64(2)
    moved = 0
    for seed in range(8):
        costs, at = costs_and_slots(seed, padded, limited)
        climb = Climb(costs, at.copy())
        if not climb.fits():
            continue
        for budget in (0, 7, 10**6):
            mine, climb = at.copy(), Climb(costs, at.copy())
            used = 0
            for word in words:
                if climb.simulated >= budget:
                    break
                climb.trial(int(word))
                used += 1
            assert improved(mine, costs, words, budget) == (max(climb.before), climb.simulated, used)
            assert mine.tolist() == climb.at.tolist()
            moved += not np.array_equal(mine, at)
    assert moved > 3


@pytest.mark.parametrize("shape", [(1, 1, 0, 0, 1), (1, 3, 1, 1, 1), (2, 2, 1, 0, 1), (3, 1, 2, 1, 1), (1, 2, 0, 1, 3)])
def test_clocks_are_those_of_whole_simulations_whatever_was_tried(shape: tuple[int, int, int, int, int]) -> None:
    """Two components of so many ranks, stages, encoders and generators, with waves enough that changes wear off; each
    stage holds so many microbatches more than the next."""
    each, stages, encoders, generators, drop = shape
    random, waves, rows = np.random.default_rng(3), 24, encoders + 1 + generators
    own = random.integers(0, 100, (rows, 4 * each * waves + 1)) * (random.random((rows, 1)) < 0.8)
    own[:, -1], none = 0, np.zeros(0, np.int64)
    held = np.array([*[drop * stages + 3] * encoders, *range(drop * stages + 1, 1, -drop), *[1] * generators])
    transfer = random.integers(0, 9, rows)
    costs = components.Costs(
        own, random.integers(0, 9, rows), random.integers(0, 250, rows), none, none.reshape(0, 0), none, none,
        held, transfer, transfer, encoders, each, False, none,
    )  # fmt: skip
    at = random.permutation(4 * each * waves).reshape(2 * each, waves, 2)
    climb = pipeline.climb_of(at, costs)
    assert pipeline.go_on(climb, np.zeros(0, np.uint64), 10) == (2, 0)
    plain = Climb(costs, at.copy())
    for word in random.integers(0, 1 << 63, 50, np.uint64):
        pipeline.go_on(climb, np.array([word]), 10)
        plain.trial(int(word))
        assert at.tolist() == plain.at.tolist()
        whole = pipeline.climb_of(at.copy(), costs)
        pipeline.go_on(whole, np.zeros(0, np.uint64), 10)
        assert climb.makespan.tolist() == whole.makespan.tolist()
        assert all(np.array_equal(*pair) for pair in zip(climb.clocks, whole.clocks, strict=True))
