"""Kernels of the sequence-parallel planner, in plain Python against their definitions on small clusters."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from planning.kernels.interpreted import interpreted

from dataserver.planning import I64

grouping = interpreted("kernels.grouping")
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
        assert grouping._least_work(case.times, case.floors) == sum(least) - lost


def test_a_group_takes_as_many_tokens_as_its_memory_and_the_easiest_sequence_s_pace_allow() -> None:
    lengths, times, floors = np.array([40, 10]), np.array([[900, 500, 300], [100, 50, 0]]), np.array([1, 0])

    def limits(limit: int, easiest: int) -> list[int]:
        found = np.empty(3, np.int64)
        grouping._limit_tokens(lengths, times, floors, 20, limit, easiest, found)
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
        grouping._limit_tokens(np.array([3, 1]), huge, np.array([0, 0]), 1 << 40, limit, 1, found)
        assert found[0] == (limit + 1 if limit < 1 << 20 else 1 << 40)


def test_exchanges_take_the_least_time_that_there_is_room_for() -> None:
    random, outcomes = np.random.default_rng(5), set()
    for _ in range(300):
        columns = int(random.integers(1, 4))
        tokens, left = random.integers(0, 4, columns), random.integers(0, 5, columns)
        penalties = np.sort(random.integers(0, 7, columns))
        classes = [f for f in range(columns) for _ in range(tokens[f])]
        best = grouping.NEVER
        for chosen in product(range(columns), repeat=len(classes)):
            if all(j >= f for j, f in zip(chosen, classes, strict=True)) and all(
                chosen.count(j) <= left[j] for j in range(columns)
            ):
                best = min(best, sum(int(penalties[j] - penalties[f]) for j, f in zip(chosen, classes, strict=True)))
        after = left.copy()
        assert grouping._least_exchange(tokens, after, penalties) == best
        if best < grouping.NEVER:
            assert after.sum() == left.sum() - tokens.sum()
        outcomes.add(best < grouping.NEVER)
    assert outcomes == {False, True}


def test_bounds_of_compositions_are_sound_and_what_they_say() -> None:
    for number, case in enumerate(cases(60, most=4)):
        easiest = int((case.times[:, -1] * 1000 // case.lengths).argmin())
        penalties = np.arange(case.times.shape[1]) * 500_000 * (number % 3)
        for limit in (LONG, 30):
            scratch = grouping._scratch(len(case.lengths), case.compositions)
            grouping.composition_bounds(
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
            grouping._limit_tokens(case.lengths, case.times, case.floors, case.room, limit, easiest, room)
            tokens = np.bincount(case.floors, case.lengths, len(penalties)).astype(np.int64)
            work = grouping._least_work(case.times, case.floors)
            for composition, bound in zip(case.compositions, found.tolist(), strict=True):
                exchange = grouping._least_exchange(tokens, composition * room, penalties)
                open_to_longest = [j for j in case.columns(composition) if j >= case.floors[0]]
                single = min((int(case.times[0, j]) for j in open_to_longest), default=grouping.NEVER)
                assert bound == (
                    max((work + exchange // 1000) // case.cells, single)
                    if exchange < grouping.NEVER
                    else grouping.NEVER
                )


def test_longest_first_goes_to_the_group_that_finishes_first_and_has_room() -> None:
    given_up = set()
    for case in cases(200):
        for composition in case.compositions:
            columns = case.columns(composition)
            for limit, spare in ((LONG, LONG), (40, LONG), (LONG, 12), (LONG, 40)):
                left, chosen = spare, list[int]()
                loads, free, took = [0] * len(columns), [case.room << j for j in columns], [0] * len(columns)
                for k in case.sequences:
                    ends = {
                        (loads[g] + int(case.times[k, j]), j, -took[g], g)
                        for g, j in enumerate(columns)
                        if j >= case.floors[k] and free[g] >= case.lengths[k]
                    }
                    end, j, _, g = min(ends, default=(LONG, 0, 0, 0))
                    if end >= limit:
                        break
                    loads[g], free[g], took[g] = end, free[g] - int(case.lengths[k]), k + 1
                    floor = int(case.floors[k])
                    left -= (int(case.times[k, j]) << j) - (int(case.times[k, floor]) << floor)
                    if left <= 0:
                        break
                    chosen.append(g)
                scratch = grouping._scratch(len(case.lengths), case.compositions)
                num = grouping.assign(
                    case.lengths, case.times, case.floors, case.room, composition, spare, limit, scratch
                )
                placed, found, rest, group = num > 0, scratch.loads[:num], scratch.free[:num], scratch.group
                assert placed == (len(chosen) == len(case.lengths))
                assert num in (0, len(columns))
                given_up.add((limit, spare, placed))
                if placed:
                    assert (group.tolist(), found.tolist(), rest.tolist()) == (chosen, loads, free)
    assert len(given_up) == 8


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
