"""No placement is below the bound, and where the pipeline is strict the search comes to it."""

from itertools import permutations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_rows.strict_bound import component_bound_ns

from dataserver.planning import I64
from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.layouts.pipelined.placing import (
    PlacementProblem,
    balanced,
    in_disttrain_order,
    lower_bound_ns,
    makespan_ns,
    searched,
    stratified,
)
from dataserver.planning.layouts.shared.waves import one_f_one_b_in_flight
from dataserver.planning.plan.placement import Placement


def in_slots(problem: PlacementProblem, place: I64) -> Placement:
    """Sequence i in slot `place[i]`, counted rank by rank and microbatch by microbatch."""
    microbatch, slot = np.divmod(place, problem.slots)
    rank, wave = np.divmod(microbatch, problem.num_waves)
    return Placement(rank, wave, slot)


@st.composite
def problems(draw: st.DrawFn, slots_in_all: int, times: int) -> PlacementProblem:
    """Any shape of up to so many slots, times in so few nanoseconds that rounding counts."""
    sizes = product(range(1, 5), range(1, 5), range(2, 6), range(1, 4))
    shapes = [(i, r, w, m) for i, r, w, m in sizes if i * r * w * m <= slots_in_all]
    components, ranks, waves, slots = draw(st.sampled_from(shapes))
    present = draw(st.tuples(st.booleans(), st.booleans()))
    capacity = components * ranks * waves * slots
    count = draw(st.integers(1, capacity))
    stages = draw(st.integers(1, 4))
    own = np.zeros((3, count + 1), np.int64)
    base = np.zeros(3, np.int64)
    for row in range(3):
        if row == 1 or present[row // 2]:
            longest = draw(st.sampled_from([times // 3, times, 3 * times]))
            own[row, :-1] = draw(st.lists(st.integers(0, longest), min_size=count, max_size=count))
            base[row] = draw(st.integers(0, times // 3))
    return PlacementProblem(
        dp=components * ranks,
        num_waves=waves,
        slots=slots,
        components=components,
        num_stages=stages,
        num_encoders=1,
        in_flight=one_f_one_b_in_flight(stages + 2, draw(st.integers(0, 3))),
        own=own,
        way=own[:, :-1],
        base=base,
        chunks=1,
        percent=np.array([draw(st.sampled_from([0, 50, 133, 200])) for _ in range(3)], np.int64),
    )


@settings(max_examples=60, deadline=None)
@given(problems(6, 12))
def test_no_placement_is_below_the_bound(problem: PlacementProblem) -> None:
    assert lower_bound_ns(problem) <= component_bound_ns(problem) <= least(problem)


@settings(max_examples=150, deadline=None)
@given(problems(96, 40), st.integers(0, 1000), st.sampled_from([0, 1, 2]))
def test_no_order_is_below_the_bound(problem: PlacementProblem, seed: int, sorted_by: int) -> None:
    """Larger pipelines: random places, and the sequences of each rank in ascending order of one of the times."""
    capacity = problem.dp * problem.num_waves * problem.slots
    place = np.random.default_rng(seed).permutation(capacity)[: problem.num_sequences]
    placements = [in_slots(problem, place)]
    ascending = np.argsort(problem.own[sorted_by, :-1], kind="stable")
    ordered = np.empty_like(place)
    ordered[ascending] = np.sort(place)
    placements.append(in_slots(problem, ordered))
    seeds = [*placements, *(in_disttrain_order(problem, p) for p in placements), stratified(problem)]
    found = searched(problem, min(seeds, key=lambda start: makespan_ns(problem, start)), 0, 0)
    bound = component_bound_ns(problem)
    assert all(bound <= makespan_ns(problem, placement) for placement in (*seeds, found))


def wide(seed: int, extra: int) -> PlacementProblem:
    """Eight components of ten nodes, 32 waves of one sequence; encoder and generator a little faster in the mean."""
    rng = np.random.default_rng(seed)
    times = np.exp(rng.normal(13.7, 0.3, (2, 256))).astype(np.int64)
    own = np.stack([times[0], np.full(256, 1_000_000), (3 * times[0] + 2 * times[1]) // 5])
    return PlacementProblem(
        dp=8,
        num_waves=32,
        slots=1,
        components=8,
        num_stages=8,
        num_encoders=1,
        in_flight=one_f_one_b_in_flight(10, extra),
        own=np.concatenate([own, np.zeros((3, 1), np.int64)], axis=1),
        way=own,
        base=np.zeros(3, np.int64),
        chunks=1,
        percent=np.full(3, 200),
    )


def found_and_best_start(problem: PlacementProblem, seed: int) -> tuple[int, int]:
    starts = [balanced(problem, policy) for policy in (BalancePolicy.NONE, BalancePolicy.LPT)]
    starts.append(stratified(problem))
    starts += [in_disttrain_order(problem, s) for s in starts]
    best = min(starts, key=lambda start: makespan_ns(problem, start))
    return makespan_ns(problem, searched(problem, best, 0, seed)), makespan_ns(problem, best)


def test_the_search_comes_to_the_bound_of_strict_1f1b() -> None:
    """Which is well above what the work alone takes, and what two more in flight take."""
    for seed in range(5):
        bound = component_bound_ns(wide(seed, 0))
        found, start = found_and_best_start(wide(seed, 0), seed)
        assert bound <= found <= bound + bound // 800
        assert found <= start * 99 // 100
        assert bound > lower_bound_ns(wide(seed, 0)) * 101 // 100
        relaxed, _ = found_and_best_start(wide(seed, 2), seed)
        assert component_bound_ns(wide(seed, 2)) <= relaxed < bound * 99 // 100


def one_component(
    stage: list[int], generator: list[int], slots: int, stages: int, base: tuple[int, int], percent: tuple[int, int]
) -> PlacementProblem:
    """One rank behind an encoder that takes no time; forward times and base of stage and generator, strict 1F1B."""
    return PlacementProblem(
        dp=1,
        num_waves=len(stage) // slots,
        slots=slots,
        components=1,
        num_stages=stages,
        num_encoders=1,
        in_flight=one_f_one_b_in_flight(stages + 2),
        own=np.array([[0] * (len(stage) + 1), [*stage, 0], [*generator, 0]]),
        way=np.array([[0] * len(stage), stage, generator]),
        base=np.array([0, *base]),
        chunks=1,
        percent=np.array([0, *percent]),
    )


def least(problem: PlacementProblem) -> int:
    """Makespan of the best of all placements."""
    capacity = problem.dp * problem.num_waves * problem.slots
    places = permutations(range(capacity), problem.num_sequences)
    return min(makespan_ns(problem, in_slots(problem, np.array(place))) for place in places)


def test_slow_generators_cost_their_time_in_any_order() -> None:
    """Forward and backward of a stage take 1 and 2; two of six microbatches take 4 in the generator, the others 2."""
    problem = one_component([1] * 6, [1, 1, 1, 1, 2, 2], 1, 2, (0, 0), (200, 100))
    assert component_bound_ns(problem) == least(problem) == lower_bound_ns(problem) + 2


def test_what_a_microbatch_costs_beside_its_sequences_counts_once() -> None:
    """Two sequences share a microbatch, and its base is larger than what a detour skips."""
    problem = one_component([0, 4, 3, 4, 2, 0], [18, 29, 21, 18, 16, 16], 2, 1, (0, 9), (0, 100))
    assert component_bound_ns(problem) == least(problem) == 290


def test_a_detour_skips_whole_microbatches() -> None:
    """Not only the longest sequence, where two share a microbatch."""
    problem = one_component([3] * 6, [0, 12, 0, 0, 0, 21], 2, 1, (3, 0), (200, 100))
    assert component_bound_ns(problem) == 96 < least(problem) == 102


def test_ranks_without_images_in_a_wave_wait_for_no_generator() -> None:
    """Three ranks with four waves of a nanosecond; of five sequences two have images, two nanoseconds each."""
    own = np.zeros((3, 6), np.int64)
    own[2, 3:5] = 2
    problem = PlacementProblem(
        dp=3,
        num_waves=4,
        slots=1,
        components=1,
        num_stages=1,
        num_encoders=1,
        in_flight=one_f_one_b_in_flight(3, 0),
        own=own,
        way=own[:, :-1],
        base=np.array([0, 1, 0]),
        chunks=1,
        percent=np.zeros(3, np.int64),
    )
    first_wave_and_third_of_another_rank = in_slots(problem, np.array([1, 2, 3, 0, 6]))
    assert component_bound_ns(problem) <= makespan_ns(problem, first_wave_and_third_of_another_rank) == 5
