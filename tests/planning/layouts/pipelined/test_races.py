"""One rank of many microbatches is also searched from orders in which all modules get on evenly."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from builders.jobs import in_version, job_data
from builders.samples import make_samples
from planning.scattered import digest, numbers

from dataserver.planning import computing_on
from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.job.identity import parse_job
from dataserver.planning.kernels import pipeline
from dataserver.planning.layouts.pipelined import placing
from dataserver.planning.layouts.pipelined.placing import racing, search
from dataserver.planning.layouts.pipelined.placing.problem import Budgets, PlacementProblem
from dataserver.planning.plan.placement import Placement
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step, timeline

COSTS = (1_000_000, 4_000_000), (16_000_000, 100_000)
"""Fixed and per unit, of images and texts: a stage of the backbone takes about as long as the encoder."""


def long_ranks(seed: int, waves: int, dp: int = 1) -> PlacementProblem:
    """Ranks of four stages with an encoder and a generator each, whose times vary, and two more in flight."""
    random, count = np.random.default_rng(seed), dp * waves
    encoder, other = (9_000 * np.exp(random.normal(-0.15, 0.55, (2, count)))).astype(np.int64)
    times = np.stack([encoder, np.full(count, 10_000), (3 * encoder + 2 * other) // 5])
    own = np.concatenate([times, np.zeros((3, 1), np.int64)], axis=1)
    return PlacementProblem(
        dp=dp, num_waves=waves, slots=1, components=dp, num_stages=4, num_encoders=1,
        in_flight=np.array([8, 7, 6, 5, 4, 1]), own=own, way=own[:, :-1].copy(), base=np.zeros(3, np.int64), chunks=1,
        percent=np.full(3, 200),
    )  # fmt: skip


def start_of(problem: PlacementProblem) -> Placement:
    return placing.balanced(problem, BalancePolicy.NONE)


def searched(problem: PlacementProblem, seed: int) -> Placement:
    goal = placing.goal_ns(problem)
    return placing.searched(problem, start_of(problem), 7, seed, goal=goal, patient=False, in_rounds=True)


def raced(problem: PlacementProblem, seed: int, found: Placement, goal: int | None = None) -> Placement | None:
    goal = placing.goal_ns(problem) if goal is None else goal
    return placing.raced(problem, start_of(problem), found, 7, seed, None, goal)


@pytest.mark.parametrize("waves", [64, 100])
def test_a_race_finds_faster_orders_and_never_hands_back_slower_ones(waves: int) -> None:
    before, after = list[int](), list[int]()
    for seed in range(8):
        problem = long_ranks(seed, waves)
        found = searched(problem, seed)
        faster = raced(problem, seed, found)
        before.append(placing.makespan_ns(problem, found))
        after.append(before[-1] if faster is None else placing.makespan_ns(problem, faster))
        assert faster is None or after[-1] < before[-1]
        assert placing.lower_bound_ns(problem) <= after[-1]
    assert 1000 * sum(after) < 998 * sum(before)


def test_a_race_places_every_sequence_once_and_the_same_each_time() -> None:
    problem = long_ranks(3, 48, dp=2)
    one, again = (raced(problem, 3, start_of(problem)) for _ in range(2))
    assert one is not None
    assert again is not None
    assert all(np.array_equal(getattr(one, f), getattr(again, f)) for f in ("rank", "wave", "slot"))
    assert sorted(zip(one.rank.tolist(), one.wave.tolist(), strict=True)) == [(r, w) for r in (0, 1) for w in range(48)]


@pytest.mark.parametrize(
    ("waves", "dp", "expected"),
    [
        (32, 1, "f49d7b9231d6866f"),
        (64, 1, "77fe5bfbe28681c8"),
        (64, 3, "22108c9e107b0cd2"),
        (100, 2, "64399a1d8b63d5cf"),
    ],
)
def test_golden_races(waves: int, dp: int, expected: str) -> None:
    """What a race finds is a part of plan_version 8: where this fails, plans of that version have changed."""
    own = np.concatenate([numbers(waves + dp, (3, dp * waves), 4_000, 24_000), np.zeros((3, 1), np.int64)], axis=1)
    problem = replace(long_ranks(0, waves, dp), own=own, way=own[:, :-1].copy())
    found = raced(problem, 5, start_of(problem))
    assert found is not None
    assert digest([found.rank.tolist(), found.wave.tolist(), found.slot.tolist()]) == expected


def test_all_searches_of_a_race_share_five_eighths_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, spent, go_on = long_ranks(1, 64), list[int](), pipeline.go_on

    def counted(*arguments: Any) -> tuple[int, int]:
        found = go_on(*arguments)
        spent.append(found[0])
        return found

    start = start_of(problem)
    before = placing.makespan_ns(problem, start)
    monkeypatch.setattr(pipeline, "go_on", counted)
    found = raced(problem, 1, start, goal=1)
    assert found is not None
    assert placing.makespan_ns(problem, found) < before
    budget = search.budget_of(problem)
    assert 5 * budget // 8 <= sum(spent) <= 5 * budget // 8 + 16


@pytest.mark.parametrize(
    "changes",
    [
        {"images": np.ones(65, np.int64)},
        {"budgets": Budgets(np.ones((3, 65), np.int64), np.full(3, 9), np.ones(3, np.int64))},
        {"components": 1},
        {"slots": 3, "num_waves": 31},
    ],
)
def test_a_race_is_for_single_ranks_of_many_microbatches_without_memory(changes: dict[str, Any]) -> None:
    problem = long_ranks(0, 32, dp=2)
    assert raced(problem, 0, start_of(problem)) is not None
    changed = replace(problem, **changes)
    assert raced(changed, 0, start_of(changed)) is None


@pytest.mark.parametrize(("waves", "dp", "races"), [(32, 3, True), (32, 4, False), (512, 1, True), (513, 1, False)])
def test_a_race_is_for_a_few_ranks_of_so_many_microbatches(waves: int, dp: int, races: bool) -> None:
    """More ranks are improved in pairs."""
    problem = long_ranks(1, waves, dp)
    assert (raced(problem, 1, start_of(problem)) is not None) is races


def test_there_is_no_race_where_nothing_can_be_won() -> None:
    problem = long_ranks(0, 64)
    assert raced(problem, 0, start_of(problem), goal=placing.makespan_ns(problem, start_of(problem))) is None


@pytest.mark.parametrize("scale", [1, 10**9])
def test_even_orders_by_definition(scale: int) -> None:
    """Of two ranks; also where times are far larger than what the squares of whole numbers hold."""
    times = np.random.default_rng(5).integers(1, 50, (3, 2, 17)) * scale
    for rank, order in enumerate(racing._even(times).tolist()):
        assert sorted(order) == list(range(17))
        shares = [[Fraction(17 * int(t), int(row.sum())) - 1 for t in row] for row in times[:, rank]]
        so_far, left = [Fraction(0)] * 3, set(range(17))
        for taken in order:
            distance = {k: sum((s + row[k]) ** 2 for s, row in zip(so_far, shares, strict=True)) for k in left}
            assert distance[taken] - min(distance.values()) < Fraction(1, 1_000)
            so_far = [s + row[taken] for s, row in zip(so_far, shares, strict=True)]
            left.remove(taken)


def test_even_orders_are_also_taken_backwards_and_with_small_ends() -> None:
    problem = long_ranks(2, 40)
    forwards, small, backwards, both = (p.wave.tolist() for p in racing.even_orders(problem, start_of(problem)))
    assert backwards == [39 - wave for wave in forwards]
    through = problem.own[:, :-1].sum(axis=0) + 3 * problem.own[1, :-1]
    for order in (small, both):
        assert sorted(order) == list(range(40))
        assert through[[order.index(39), order.index(0)]].tolist() == np.sort(through)[:2].tolist()


def test_there_is_no_race_near_the_bound() -> None:
    """A rank whose backbone takes nearly all of the time is searched once."""
    problem = long_ranks(0, 64)
    own = problem.own.copy()
    own[1, :-1] *= 50
    slow = replace(problem, own=own, way=own[:, :-1].copy())
    found = searched(slow, 0)
    assert raced(slow, 0, found, goal=1) is None


def test_searches_that_would_not_catch_up_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where image times are very uneven, even orders are far from good ones."""
    problem = long_ranks(0, 64)
    own = problem.own.copy()
    own[::2, :-1] = np.exp(np.random.default_rng(0).normal(8, 2, (2, 64))).astype(np.int64)
    uneven, spent, go_on = replace(problem, own=own, way=own[:, :-1].copy()), list[int](), pipeline.go_on

    def counted(*arguments: Any) -> tuple[int, int]:
        found = go_on(*arguments)
        spent.append(found[0])
        return found

    found = searched(uneven, 0)
    monkeypatch.setattr(pipeline, "go_on", counted)
    assert raced(uneven, 0, found) is None
    assert sum(spent) <= 4 * search.budget_of(uneven) // 64 + 16


def test_plans_of_one_rank_are_raced_since_version_8() -> None:
    """Never slower than those of version 7, and the same for any number of threads."""
    data = job_data(encoder=1, backbone=(1, 8), generator=1, stream={"global_batch": 64, "packing": {"enabled": False}})
    data["execution"]["layout"] = {"kind": "pipelined", "extra_in_flight": 2, "fewest_microbatches": True}
    image, text = ({"microbatch_ns": fixed, "linear_ps": slope, "quadratic_fs": 0} for fixed, slope in COSTS)
    for module in data["execution"]["modules"]:
        module["cost"] = text if module["kind"] == "backbone" else image
    new = parse_job(data)
    old, number = in_version(new, 7), 0
    for seed in range(4):
        samples, plans = make_samples(new, 64, seed), list[StepPlan]()
        for count in (1, 3):
            with computing_on(count):
                plans.append(plan_step(new, 0, samples))
        plan, before = plans[0], plan_step(old, 0, samples)
        assert len({p.hash for p in plans}) == 1
        assert timeline(new.spec, plan).makespan_ns <= timeline(old.spec, before).makespan_ns
        assert not any("even orders" in c.name for c in before.candidates)
        number += any("even orders" in c.name for c in plan.candidates)
    assert number
