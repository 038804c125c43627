"""What the searches for placements find, pinned: components, exchanges, memory; whatever the size of their pieces."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from planning.scattered import digest, numbers

from dataserver.planning import I64, U64, yielding_to
from dataserver.planning.kernels import pipeline
from dataserver.planning.kernels.pipeline import Climb
from dataserver.planning.layouts.pipelined.placing import search
from dataserver.planning.layouts.pipelined.placing.problem import Budgets, PlacementProblem
from dataserver.planning.layouts.pipelined.placing.transfers import Transfers
from dataserver.planning.plan.placement import Placement


def problem_of(seed: int, *, padded: bool = False, limited: bool = False) -> tuple[PlacementProblem, Placement]:
    """Up to two encoders, a backbone of up to three stages, up to two generators, on one to three components."""
    encoders, generators, stages, components, wide, waves, slots, extra = numbers(seed, (8,), 0, 5).tolist()
    encoders, generators, stages, components = encoders % 3, generators % 3, stages % 3 + 1, components % 3 + 1
    wide, waves, slots = wide % 2 + 1, waves % 4 + 1, slots % 3 + 1
    rows, places = encoders + 1 + generators, components * wide * waves * slots
    count = max(1, places - seed % 3)
    own, need = numbers(seed + 1, (rows, count + 1), 0, 90), numbers(seed + 2, (rows, count + 1), 0, 40)
    for row in (*range(encoders), *range(encoders + 1, rows)):
        own[row] *= own[row] % 3 > 0  # some sequences have no images
    own[:, -1] = need[:, -1] = 0
    nodes = encoders + stages + generators
    window = np.minimum(numbers(seed + 3, (rows,), 1, 3), waves)
    budget = np.sort(need[:, :-1], axis=1)[:, -1] + need.sum(axis=1) * window * (slots + seed % 3) * (
        3 + 3 * padded
    ) // (4 * places)
    budget[encoders + 1 :] = np.where(budget[encoders + 1 :] % 4 == 0, -1, budget[encoders + 1 :])
    problem = PlacementProblem(
        dp=components * wide,
        num_waves=waves,
        slots=slots,
        components=components,
        num_stages=stages,
        num_encoders=encoders,
        in_flight=np.arange(nodes, 0, -1) + np.where(np.arange(nodes) < nodes // 2, extra % 3, 0),
        own=own,
        way=own[:, :-1],
        base=numbers(seed + 4, (rows,), 0, 20),
        chunks=1,
        percent=numbers(seed + 5, (rows,), 0, 300),
        items=np.append(numbers(seed + 6, (count,), 1, 3), 0) if padded else None,
        budgets=Budgets(need, budget, window) if limited else None,
        transfers=Transfers(
            own[:, :-1], own[:, :-1].min(axis=1), numbers(seed + 7, (rows,), 0, 30), np.ones(rows, np.int64)
        )
        if seed % 2
        else None,
    )
    place = np.argsort(numbers(seed + 8, (places,), 0, 10**6), kind="stable")[:count]
    rank, rest = np.divmod(place, waves * slots)
    return problem, Placement(rank, *np.divmod(rest, slots))


def empty(problem: PlacementProblem) -> I64:
    """Slots that hold nothing."""
    return np.full((problem.dp, problem.num_waves, problem.slots), -1, np.int64)


def spelled(placement: Placement) -> list[list[int]]:
    return [placement.rank.tolist(), placement.wave.tolist(), placement.slot.tolist()]


def found_in(problem: PlacementProblem, placement: Placement, seed: int) -> list[object]:
    """What is made of a placement: its time, as it fits, what lacks, and what the search makes of it."""
    fitted, shortfall = search.fitted(problem, placement)
    found: list[object] = [int(search.makespan_ns(problem, placement)), spelled(fitted), shortfall]
    found.append(search.shortfall_alone(problem))
    if shortfall is None:
        starts = [placement, fitted][problem.budgets is not None :]
        best = min(starts, key=partial(search.makespan_ns, problem))
        better = search.searched(problem, best, seed, 7, 1 + seed % 4)
        assert search.makespan_ns(problem, better) <= search.makespan_ns(problem, fitted)
        assert spelled(search.fitted(problem, better)[0]) == spelled(better)
        found += [spelled(better), int(search.makespan_ns(problem, better))]
    return found


GOLDEN = {
    (False, False): "f30f495876f4484b",
    (True, False): "d0d9c9d83af6a585",
    (False, True): "25d9e8496dd210b0",
    (True, True): "98165c2176f43e0f",
}


@pytest.mark.parametrize(("padded", "limited"), GOLDEN)
def test_golden_placements(padded: bool, limited: bool) -> None:
    """A step's plan depends on them, so that every server has to find the same."""
    found = [found_in(*problem_of(seed, padded=padded, limited=limited), seed) for seed in range(16)]
    assert digest(found) == GOLDEN[padded, limited]


def test_golden_makespans() -> None:
    """Sequences without images in some components, on one rank of them or all, keep nobody waiting."""
    steps = [problem_of(seed, padded=seed % 5 == 0) for seed in range(16, 160)]
    assert digest([int(search.makespan_ns(*step)) for step in steps]) == "0044dc66c63738ef"


def test_searches_in_pieces_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pause for others after so many operations, and go on where they were."""
    steps = [(*problem_of(seed, padded=bool(seed % 2), limited=True), seed) for seed in range(12)]

    def found_soon(problem: PlacementProblem, placement: Placement, seed: int) -> list[list[int]]:
        return spelled(search.searched(problem, search.fitted(problem, placement)[0], 2, seed, patient=False))

    whole = [[found_in(*step), found_soon(*step)] for step in steps]
    for once in (1, 17):
        monkeypatch.setattr(search, "LOOKS_AT_ONCE", once)
        monkeypatch.setattr(search, "OPERATIONS_AT_ONCE", 1000 * once)
        assert [[found_in(*step), found_soon(*step)] for step in steps] == whole


def test_searches_let_others_have_a_turn_between_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = dict.fromkeys(product(("fitted", "searched"), (1, 40, 10**9)), 0)
    for once in (1, 40, 10**9):
        monkeypatch.setattr(search, "LOOKS_AT_ONCE", once)
        monkeypatch.setattr(search, "OPERATIONS_AT_ONCE", 1000 * once)
        for seed in range(6):
            problem, placement = problem_of(seed, limited=True)
            counted: list[None] = []
            with yielding_to(partial(counted.append, None)):
                fitted, shortfall = search.fitted(problem, placement)
                turns["fitted", once] += len(counted)
                counted.clear()
                if shortfall is None:
                    search.searched(problem, fitted, 1, 7)
                    turns["searched", once] += len(counted)
    assert list(turns.values()) == [296, 65, 6, 334, 12, 6]


def test_few_exchanges_are_tried_for_memory_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget ends the search for exchanges, also between two of a microbatch."""
    found = []
    for looks in (1, 3):
        monkeypatch.setattr(search, "FITTING_LOOKS", looks)
        for seed in range(12):
            problem, placement = problem_of(seed, padded=bool(seed % 2), limited=True)
            assert problem.budgets is not None
            tight = replace(problem, budgets=replace(problem.budgets, budget=problem.budgets.budget * 4 // 5))
            fitted, shortfall = search.fitted(tight, placement)
            found.append((spelled(fitted), shortfall))
    assert digest(found) == "d8a315fd23e2e488"


@pytest.mark.parametrize(
    ("budget", "simulates", "used", "limits"),
    [
        (7, [], 1, [6]),
        (100, [10, 10, 10, 99], 1, [40, 40, 40, 40]),
        (100, [40, 40, 19], 1, [40, 40, 19]),
        (100, [40, 40, 18, 1], 1, [40, 40, 19, 1]),
        (100, [10, 10, 10], 4, [40, 40, 40]),
    ],
)
def test_a_search_spends_its_budget_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, budget: int, simulates: list[int], used: int, limits: list[int]
) -> None:
    """It ends when so many components are simulated, those of the first look included, or when all words are used."""
    problem, _ = next(p for p in map(problem_of, range(50)) if p[0].components == 1)
    asked, words_left, results = [], [], iter([*simulates, 10**9])

    def go_on(climb: Climb, words: I64, limit: int, goal: int = -1) -> tuple[int, int]:
        assert goal == -1
        if not climb.is_ready:
            assert not len(words)
            climb.makespan[:] = 101
            return 1, 0
        asked.append(limit)
        words_left.append(len(words))
        climb.makespan[:] -= 1
        return next(results), used

    monkeypatch.setattr("dataserver.planning.kernels.pipeline.go_on", go_on)
    monkeypatch.setattr(search, "OPERATIONS_AT_ONCE", 40 * search.component_operations(problem))
    search._improve(problem, empty(problem), np.zeros(12, np.uint64), budget)
    assert asked == limits
    assert words_left == [12 - used * n for n in range(len(limits))]


@pytest.mark.parametrize(("operations", "asked"), [(1, [(0, 1)] * 3 + [(1, 1)] * 4), (7, [(0, 1)] * 3 + [(2, 1)] * 4)])
def test_no_piece_of_a_search_grows_with_the_components(
    monkeypatch: pytest.MonkeyPatch, operations: int, asked: list[tuple[int, int]]
) -> None:
    """Not the first ones, which simulate all components; nor those whose words look for the slowest of all of them."""
    found, whole = [], pipeline.go_on

    def go_on(climb: Climb, words: U64, limit: int, goal: int = -1) -> tuple[int, int]:
        found.append((len(words), limit))
        return whole(climb, words, limit, goal) if not climb.is_ready else (1, len(words))

    monkeypatch.setattr(pipeline, "go_on", go_on)
    monkeypatch.setattr(search, "OPERATIONS_AT_ONCE", operations)
    problem, _ = next(p for p in map(problem_of, range(50)) if p[0].components == 3)
    search._improve(problem, empty(problem), np.zeros(100, np.uint64), 3 + 4)
    assert found == asked
