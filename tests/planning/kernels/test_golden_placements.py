"""What the searches for placements find, pinned: islands, exchanges, memory; whatever the size of their pieces."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from dataserver.planning.pipelined.placing import search
from dataserver.planning.pipelined.placing.hops import Hops
from dataserver.planning.pipelined.placing.problem import PlacementProblem, Rooms
from dataserver.planning.placement import Placement
from dataserver.planning.samples import I64


def numbers(seed: int, shape: tuple[int, ...], low: int, high: int) -> I64:
    """Scattered, from low to high, the same with every version of numpy."""
    found = np.arange(1, np.prod(shape, dtype=np.int64) + 1, dtype=np.uint64) * np.uint64(1 + 2 * seed)
    for factor, shift in ((0x9E3779B97F4A7C15, 31), (0xBF58476D1CE4E5B9, 29)):
        found *= np.uint64(factor)
        found ^= found >> np.uint64(shift)
    return low + (found % np.uint64(high - low + 1)).astype(np.int64).reshape(shape)


def problem_of(seed: int, *, padded: bool = False, limited: bool = False) -> tuple[PlacementProblem, Placement]:
    """Up to two encoders, a backbone of up to three stages, up to two generators, on one to three islands."""
    encoders, generators, stages, islands, wide, waves, slots, extra = numbers(seed, (8,), 0, 5).tolist()
    encoders, generators, stages, islands = encoders % 3, generators % 3, stages % 3 + 1, islands % 3 + 1
    wide, waves, slots = wide % 2 + 1, waves % 4 + 1, slots % 3 + 1
    rows, places = encoders + 1 + generators, islands * wide * waves * slots
    count = max(1, places - seed % 3)
    own, need = numbers(seed + 1, (rows, count + 1), 0, 90), numbers(seed + 2, (rows, count + 1), 0, 40)
    for row in (*range(encoders), *range(encoders + 1, rows)):
        own[row] *= own[row] % 3 > 0  # some sequences have no images
    own[:, -1] = need[:, -1] = 0
    nodes = encoders + stages + generators
    window = np.minimum(numbers(seed + 3, (rows,), 1, 3), waves)
    room = np.sort(need[:, :-1], axis=1)[:, -1] + need.sum(axis=1) * window * (slots + seed % 3) * (3 + 3 * padded) // (
        4 * places
    )
    room[encoders + 1 :] = np.where(room[encoders + 1 :] % 4 == 0, -1, room[encoders + 1 :])
    problem = PlacementProblem(
        dp=islands * wide,
        num_waves=waves,
        slots=slots,
        islands=islands,
        num_stages=stages,
        num_encoders=encoders,
        in_flight=np.arange(nodes, 0, -1) + np.where(np.arange(nodes) < nodes // 2, extra % 3, 0),
        own=own,
        way=own[:, :-1],
        base=numbers(seed + 4, (rows,), 0, 20),
        percent=numbers(seed + 5, (rows,), 0, 300),
        items=np.append(numbers(seed + 6, (count,), 1, 3), 0) if padded else None,
        rooms=Rooms(need, room, window) if limited else None,
        hops=Hops(own[:, :-1], numbers(seed + 7, (rows,), 0, 30)) if seed % 2 else None,
    )
    place = np.argsort(numbers(seed + 8, (places,), 0, 10**6), kind="stable")[:count]
    rank, rest = np.divmod(place, waves * slots)
    return problem, Placement(rank, *np.divmod(rest, slots))


def digest(found: object) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def spelled(placement: Placement) -> list[list[int]]:
    return [placement.rank.tolist(), placement.wave.tolist(), placement.slot.tolist()]


def found_in(problem: PlacementProblem, placement: Placement, seed: int) -> list[object]:
    """What is made of a placement: its time, as it fits, what lacks, and what the search makes of it."""
    fitted, lacking = search.fitted(problem, placement)
    found: list[object] = [int(search.makespan_ns(problem, placement)), spelled(fitted), lacking]
    found.append(search.lacking_alone(problem))
    if lacking is None:
        better = search.searched(problem, [placement, fitted][problem.rooms is not None :], seed, 7, 1 + seed % 4)
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
    """Sequences without images in some islands, on one rank of them or all, keep nobody waiting."""
    steps = [problem_of(seed, padded=seed % 5 == 0) for seed in range(16, 160)]
    assert digest([int(search.makespan_ns(*step)) for step in steps]) == "0044dc66c63738ef"


def test_searches_in_pieces_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pause for others after so many operations, and go on where they were."""
    steps = [(*problem_of(seed, padded=bool(seed % 2), limited=True), seed) for seed in range(12)]
    whole = [found_in(*step) for step in steps]
    for once in (1, 17):
        monkeypatch.setattr(search, "LOOKS_AT_ONCE", once)
        monkeypatch.setattr(search, "OPERATIONS_AT_ONCE", 1000 * once)
        assert [found_in(*step) for step in steps] == whole


def test_few_exchanges_are_tried_for_memory_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget ends the search for exchanges, also between two of a microbatch."""
    found = []
    for looks in (1, 3):
        monkeypatch.setattr(search, "FITTING_LOOKS", looks)
        for seed in range(12):
            problem, placement = problem_of(seed, padded=bool(seed % 2), limited=True)
            assert problem.rooms is not None
            tight = replace(problem, rooms=replace(problem.rooms, room=problem.rooms.room * 4 // 5))
            fitted, lacking = search.fitted(tight, placement)
            found.append((spelled(fitted), lacking))
    assert digest(found) == "d8a315fd23e2e488"
