"""Kernels that place items one by one, in plain Python against lists: every bin of every small case."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from planning.kernels.interpreted import interpreted

from dataserver.planning import I64, yielding_to

greedy, packing = interpreted("kernels.greedy"), interpreted("kernels.packing")
heap, arrays = interpreted("kernels.heap"), interpreted("kernels.arrays")
spreading = interpreted("kernels.spreading")


def cases() -> Iterator[tuple[I64, I64, I64]]:
    """Loads with many ties, memory, and an order of falling loads."""
    random = np.random.default_rng(7)
    for number in range(120):
        count = number % 13
        loads, memory = random.integers(0, (3, 8, 90)[number % 3], count), random.integers(0, 6, count)
        yield loads, memory, np.argsort(-loads, kind="stable")


def test_heaps_sort_by_key_and_number() -> None:
    for loads, _, _ in cases():
        order = np.empty(len(loads), np.int64)
        heap.sort_by(loads, order)
        assert order.tolist() == np.argsort(loads, kind="stable").tolist()
    heap.sift_down(np.zeros(0, np.int64), 0, np.zeros(0, np.int64))


def test_heaps_keep_the_least_on_top_whatever_comes_and_goes() -> None:
    random = np.random.default_rng(3)
    for _ in range(60):
        key, found = random.integers(0, 5, 12), np.full(12, -1)
        inside: set[int] = set()
        for number in range(12):
            found[len(inside)] = number
            inside.add(number)
            heap.sift_up(found, len(inside), key)
            assert found[0] == min(inside, key=lambda n: (key[n], n))
            if random.integers(0, 3) == 0:
                inside.remove(int(found[0]))
                found[0] = found[len(inside)]
                heap.sift_down(found, len(inside), key)
                assert not inside or found[0] == min(inside, key=lambda n: (key[n], n))
            assert set(found[: len(inside)].tolist()) == inside
        key[found[0]] += 3
        heap.sift_down(found, len(inside), key)
        assert found[0] == min(inside, key=lambda n: (key[n], n))


def test_arrays_without_numpy() -> None:
    for values in product(range(3), repeat=4):
        given = np.array(values)
        assert arrays.first_largest(given) == values.index(max(values))
        assert arrays.largest(given) == max(values)
        target = np.full(6, 9)
        arrays.copy_to(target, given)
        assert target.tolist() == [*values, 9, 9]
    assert arrays.largest(np.array([-5])) == -5


def one_by_one(loads: I64, memory: I64, order: I64, bins: int, capacity: int, cap: int) -> tuple[list[int], int]:
    """The bin of each item, and the first that found none."""
    found, load, items, used = [-1] * len(loads), [0] * bins, [0] * bins, [0] * bins
    for item in order.tolist():
        free = [b for b in range(bins) if items[b] < capacity and used[b] + memory[item] <= cap]
        if not free:
            return found, item
        b = found[item] = min(free, key=lambda b: (load[b], b))
        load[b], items[b], used[b] = load[b] + loads[item], items[b] + 1, used[b] + memory[item]
    return found, -1


def test_longest_first_goes_to_the_lightest_bin_with_a_place() -> None:
    for loads, memory, order in cases():
        for bins in (1, 2, 3, 5):
            even = -(-len(loads) // bins)
            for capacity in (even, even + 1, len(loads) + 1):
                expected, _ = one_by_one(loads, 0 * memory, order, bins, capacity, 0)
                whole = np.array([0, len(loads)])
                assert greedy.longest_first(loads, order, whole, bins, capacity).tolist() == expected


def test_longest_first_begins_anew_with_each_part() -> None:
    for loads, memory, order in cases():
        cuts = np.array([0, len(loads) // 3, len(loads) // 3, len(loads)])
        found, expected = greedy.longest_first(loads, order, cuts, 2, len(loads) + 1), np.full(len(loads), -1)
        for start, end in pairwise(cuts.tolist()):
            alone, _ = one_by_one(loads, 0 * memory, order[start:end], 2, len(loads) + 1, 0)
            expected[order[start:end]] = np.array(alone)[order[start:end]]
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("bins", [1, 2, 3, 4])
def test_longest_first_within_memory(bins: int) -> None:
    outcomes = set()
    for loads, memory, order in cases():
        mean = -(-int(memory.sum()) // bins)
        for capacity, cap in product((-(-len(loads) // bins), len(loads) + 1), (mean, mean + 1, mean + 4, 99)):
            expected = one_by_one(loads, memory, order, bins, capacity, cap)
            found, shortfall = greedy.longest_first_within(loads, memory, order, bins, capacity, cap)
            assert (found.tolist(), shortfall) == expected
            outcomes.add(shortfall >= 0)
    assert outcomes == ({False, True} if bins > 1 else {False})


def test_samples_go_to_the_fullest_sequence_with_room() -> None:
    for loads, _, order in cases():
        for seq_len in (90, 95, 130):
            tokens, room, expected = loads + 1, list[int](), [-1] * len(loads)
            for item in order.tolist():
                fits = [s for s in range(len(room)) if room[s] >= tokens[item]]
                s = min(fits, key=lambda s: (room[s], s), default=len(room))
                if s == len(room):
                    room.append(seq_len)
                room[s] -= int(tokens[item])
                expected[item] = s
            assert packing.best_fit(tokens, order, seq_len).tolist() == expected


def test_best_fit_lets_others_have_a_turn_and_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(1, 161) * 37 % 64 + 1
    order = np.argsort(-tokens, kind="stable")
    whole, turns = packing.best_fit(tokens, order, 100).tolist(), []
    for once in (1, 200, packing.MOVES_AT_ONCE):
        monkeypatch.setattr(packing, "MOVES_AT_ONCE", once)
        counted: list[None] = []
        with yielding_to(partial(counted.append, None)):
            assert packing.best_fit(tokens, order, 100).tolist() == whole
        turns.append(len(counted))
    assert turns[0] == len(tokens) - 1
    assert 160 * 32 // 300 < turns[1] < turns[0] / 2  # more than its searches alone take
    assert turns[2] == 0
    assert packing.best_fit(tokens[:0], order[:0], 100).tolist() == []


def test_items_of_a_wave_go_to_the_rank_of_their_component_that_finishes_them_first() -> None:
    outcomes = set()
    for number, (loads, need, order) in enumerate(cases()):
        components, width = 1 + number % 2, 1 + number % 3
        wave, component = np.sort(loads % 3)[np.argsort(order)], loads % components
        for room in (6, 9, 99):
            finish, used, expected, shortfall, current = [0] * 6, [0] * 6, [-1] * len(loads), -1, -1
            for item in order.tolist():
                if wave[item] != current:
                    used, current = [0] * 6, int(wave[item])
                ranks = range(component[item] * width, (component[item] + 1) * width)
                free = [r for r in ranks if used[r] + need[item] <= room]
                if not free:
                    shortfall = item
                    break
                r = expected[item] = min(free, key=lambda r: (finish[r], r))
                finish[r], used[r] = finish[r] + loads[item], used[r] + need[item]
            found, first = spreading.first_to_finish(loads, need, order, wave, component, components, width, room)
            assert (found.tolist(), first) == (expected, shortfall)
            outcomes.add(shortfall >= 0)
    assert outcomes == {False, True}
