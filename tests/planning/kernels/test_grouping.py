"""Kernels of the sequence-parallel planner, in plain Python against their definitions on small clusters."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from planning.kernels.interpreted import interpreted

from dataserver.planning import I64

grouping = interpreted("kernels.grouping")
compositions = interpreted("kernels.compositions")
LONG = 10**9


@dataclass
class Case:
    """Sequences, longest first, and a cluster: see `kernels/grouping.py`."""

    lengths: I64
    times: I64
    floors: I64
    room: int
    compositions: I64
    cells: int

    @property
    def sequences(self) -> range:
        return range(len(self.lengths))

    def columns(self, composition: I64) -> list[int]:
        return [j for j, count in enumerate(composition.tolist()) for _ in range(count)]

    def makespan(self, columns: list[int], groups: tuple[int, ...]) -> int:
        """LONG where a group is too small for a sequence, or holds too many tokens."""
        loads, free = [0] * len(columns), [self.room << j for j in columns]
        for k, g in enumerate(groups):
            if columns[g] < self.floors[k]:
                return LONG
            loads[g], free[g] = loads[g] + int(self.times[k, columns[g]]), free[g] - int(self.lengths[k])
        return LONG if min(free) < 0 else max(loads)


def cases(count: int, most: int = 5) -> Iterator[Case]:
    """Clusters of 2 and 4 cells; room is scarce in some, and times have ties in some."""
    random = np.random.default_rng(11)
    for number in range(count):
        n, columns = 1 + number % most, 2 + number % 2
        compositions = [[2, 0], [0, 1]] if columns == 2 else [[4, 0, 0], [2, 1, 0], [0, 2, 0], [0, 0, 1]]
        room = int(random.integers(6, 14))
        lengths = np.sort(random.integers(1, min(9, room) if number % 5 else room << (columns - 1), n))[::-1].copy()
        floors = np.array([next(j for j in range(columns) if room << j >= length) for length in lengths.tolist()])
        work = lengths * random.integers(1, (3, 20)[number % 2], n)
        times = np.stack([-(-work * (4 + j) // (4 << j)) for j in range(columns)], axis=1).astype(np.int64)
        yield Case(lengths, times, floors, room, np.array(compositions), 2 if columns == 2 else 4)


def test_the_least_work_is_that_of_each_sequence_in_its_best_degree() -> None:
    for case in cases(60):
        columns = case.times.shape[1]
        least = [min(int(case.times[k, j]) << j for j in range(case.floors[k], columns)) for k in case.sequences]
        lost = len(case.lengths) * 2 ** (columns - 1)
        assert compositions._least_work(case.times, case.floors) == sum(least) - lost


def test_a_group_takes_as_many_tokens_as_its_memory_and_the_easiest_sequence_s_pace_allow() -> None:
    lengths, times, floors = np.array([40, 10]), np.array([[900, 500, 300], [100, 50, 0]]), np.array([1, 0])

    def limits(limit: int, easiest: int) -> list[int]:
        found = np.empty(3, np.int64)
        compositions._limit_tokens(lengths, times, floors, 20, limit, easiest, found)
        return found.tolist()

    assert limits(10**12, 1) == [20, 40, 80]
    assert limits(150, 1) == [16, 31, 80]  # 15 and 30 tokens, and one for what was rounded; a time of 0 limits nothing
    assert limits(99, 1) == [10, 20, 80]
    assert limits(0, 1) == [1, 1, 80]
    assert limits(150, 0) == [20, 13, 21]  # the smallest degree does not hold it
    assert limits(100 << 20, 1) == [20, 40, 80]
    huge = np.array([[1, 1, 1], [1, 1, 1]])
    for limit in (3, (1 << 20) - 1, 1 << 20):
        found = np.empty(3, np.int64)
        compositions._limit_tokens(np.array([3, 1]), huge, np.array([0, 0]), 1 << 40, limit, 1, found)
        assert found[0] == (limit + 1 if limit < 1 << 20 else 1 << 40)


def test_exchanges_take_the_least_time_that_there_is_room_for() -> None:
    random, outcomes = np.random.default_rng(5), set()
    for _ in range(300):
        columns = int(random.integers(1, 4))
        tokens, left = random.integers(0, 4, columns), random.integers(0, 5, columns)
        penalties = np.sort(random.integers(0, 7, columns))
        classes = [f for f in range(columns) for _ in range(tokens[f])]
        best = compositions.NEVER
        for chosen in product(range(columns), repeat=len(classes)):
            if all(j >= f for j, f in zip(chosen, classes, strict=True)) and all(
                chosen.count(j) <= left[j] for j in range(columns)
            ):
                best = min(best, sum(int(penalties[j] - penalties[f]) for j, f in zip(chosen, classes, strict=True)))
        after, lowest = left.copy(), int(np.flatnonzero([*tokens, 1])[0])
        assert compositions._least_exchange(tokens, lowest, after, penalties) == best
        if best < compositions.NEVER:
            assert after.sum() == left.sum() - tokens.sum()
        outcomes.add(best < compositions.NEVER)
    assert outcomes == {False, True}


def test_bounds_of_compositions_are_sound_and_what_they_say() -> None:
    for number, case in enumerate(cases(60, most=4)):
        easiest = int((case.times[:, -1] * 1000 // case.lengths).argmin())
        penalties = np.arange(case.times.shape[1]) * 500_000 * (number % 3)
        for limit in (LONG, 30):
            scratch = compositions.scratch_for(len(case.lengths), case.compositions)
            compositions.composition_bounds(
                case.lengths,
                case.times,
                case.floors,
                case.room,
                penalties,
                case.compositions,
                case.cells,
                limit,
                easiest,
                scratch,
            )
            found, room = scratch.bounds, np.empty(len(penalties), np.int64)
            compositions._limit_tokens(case.lengths, case.times, case.floors, case.room, limit, easiest, room)
            tokens = np.bincount(case.floors, case.lengths, len(penalties)).astype(np.int64)
            work = compositions._least_work(case.times, case.floors)
            for composition, bound in zip(case.compositions, found.tolist(), strict=True):
                exchange = compositions._least_exchange(tokens, int(case.floors[-1]), composition * room, penalties)
                open_to_longest = [j for j in case.columns(composition) if j >= case.floors[0]]
                single = min((int(case.times[0, j]) for j in open_to_longest), default=compositions.NEVER)
                evenly = (work + exchange // 1000) // case.cells if exchange < compositions.NEVER else exchange
                assert bound == (max(evenly, single) if evenly < limit else compositions.NEVER)


def test_longest_first_goes_to_the_group_that_finishes_first_and_has_room() -> None:
    given_up = set()
    for case in cases(200):
        for composition in case.compositions:
            columns = case.columns(composition)
            for limit in (LONG, 40, 25, 12):
                loads, free, took = [0] * len(columns), [case.room << j for j in columns], [0] * len(columns)
                chosen = list[int]()
                for k in case.sequences:
                    ends = {
                        (loads[g] + int(case.times[k, j]), j, -took[g], g)
                        for g, j in enumerate(columns)
                        if j >= case.floors[k] and free[g] >= case.lengths[k]
                    }
                    end, _, _, g = min(ends, default=(LONG, 0, 0, 0))
                    if end >= limit:
                        break
                    loads[g], free[g], took[g] = end, free[g] - int(case.lengths[k]), k + 1
                    chosen.append(g)
                scratch = compositions.scratch_for(len(case.lengths), case.compositions)
                if not compositions.needs(case.times, case.floors, limit, scratch):
                    assert any(min(case.times[k, case.floors[k] :]) >= limit for k in case.sequences)
                    continue
                placed = len(chosen) == len(case.lengths)
                assert compositions.holds(composition, scratch.need, limit) >= placed
                num = grouping.assign(
                    case.lengths, case.times, case.floors, case.room, composition, case.cells, limit, scratch
                )
                found, rest, group = scratch.loads[:num], scratch.free[:num], scratch.group
                assert num == (len(columns) if placed else 0)
                given_up.add((limit, placed))
                if placed:
                    assert (group.tolist(), found.tolist(), rest.tolist()) == (chosen, loads, free)
    assert len(given_up) == 8


def test_what_sequences_need_by_a_limit_is_what_they_take_in_degrees_that_end_before_it() -> None:
    held = set()
    for case in cases(100):
        columns = case.times.shape[1]
        for limit in (60, 25):
            scratch = compositions.scratch_for(len(case.lengths), case.compositions)
            opened = [[j for j in range(case.floors[k], columns) if case.times[k, j] < limit] for k in case.sequences]
            assert compositions.needs(case.times, case.floors, limit, scratch) == all(opened)
            if not all(opened):
                continue
            work = [min(int(case.times[k, j]) << j for j in opened[k]) for k in case.sequences]
            assert scratch.rest.tolist() == [sum(work[k:]) for k in range(len(work) + 1)]
            for column in range(columns):
                above = sum(w for w, free in zip(work, opened, strict=True) if min(free) >= column)
                times = [int(case.times[k, column]) for k in case.sequences if column in opened[k]]
                assert scratch.need[column] == above
                assert scratch.least[column] == min(times, default=compositions.NEVER)
            for composition in case.compositions:
                held.add(compositions.holds(composition, scratch.need, limit))
                if not compositions.holds(composition, scratch.need, limit):  # then no placement ends in time
                    groups = case.columns(composition)
                    every = product(range(len(groups)), repeat=len(case.lengths))
                    assert all(case.makespan(groups, placed) >= limit for placed in every)
    assert held == {False, True}


def changes(case: Case, columns: list[int], groups: list[int], last: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """What the two groups then end at, for each move out of the last group and each swap with it."""
    for k in case.sequences:
        if groups[k] != last:
            continue
        for g in range(len(columns)):
            moved = [g if i == k else groups[i] for i in case.sequences]
            if g != last and case.makespan(columns, tuple(moved)) < LONG:
                yield ends(case, columns, moved, last, g), (k, -1, g)
        for m in case.sequences:
            swapped = [{k: groups[m], m: last}.get(i, groups[i]) for i in case.sequences]
            if groups[m] != last and case.makespan(columns, tuple(swapped)) < LONG:
                yield ends(case, columns, swapped, last, groups[m]), (k, m, groups[m])


def ends(case: Case, columns: list[int], groups: list[int], *of: int) -> int:
    return max(sum(int(case.times[k, columns[g]]) for k in case.sequences if groups[k] == g) for g in of)


def test_the_group_that_finishes_last_is_relieved_by_the_best_change() -> None:
    helped = set()
    random = np.random.default_rng(2)
    for case in cases(200):
        for composition in case.compositions:
            columns = case.columns(composition)
            for _ in range(3):
                groups = [int(g) for g in random.integers(0, len(columns), len(case.lengths))]
                if case.makespan(columns, tuple(groups)) == LONG:
                    continue
                loads = [ends(case, columns, groups, g) for g in range(len(columns))]
                last = loads.index(max(loads))
                value, best = min(changes(case, columns, groups, last), key=lambda one: one[0], default=(LONG, ()))
                state = np.array(loads), np.array([case.room << j for j in columns]), np.array(groups)
                for k, g in enumerate(groups):
                    state[1][g] -= case.lengths[k]
                found = grouping._best_change(case.lengths, case.times, case.floors, np.array(columns), *state, last)
                assert found == (best if value < loads[last] else (-1, -1, -1))
                helped.add((found[0] >= 0, found[1] >= 0))
                after = grouping.improve(case.lengths, case.times, case.floors, np.array(columns), *state, 1)
                assert after == case.makespan(columns, tuple(state[2].tolist())) <= max(loads)
                assert state[0].tolist() == [ends(case, columns, state[2].tolist(), g) for g in range(len(columns))]
                spread = [case.room << j for j in columns]
                for k, g in enumerate(state[2].tolist()):
                    spread[g] -= int(case.lengths[k])
                assert state[1].tolist() == spread
                assert (state[2].tolist() == groups) == (value >= loads[last])
    assert helped == {(False, False), (True, False), (True, True)}
