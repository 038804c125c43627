"""Rows of the step optimiser: whole pipelines against their bound, and against what the papers do.

Scenario A: encoder, 8 backbone stages (forward 1 ms each), generator; 8 data-parallel ranks of 32 microbatches of one
sequence; encoder forward log-normal with mean 0.9 ms, generator 0.6 x the encoder's + 0.4 x a draw of its own. Its
held-out variant has 6 stages and 12 ranks of 24 microbatches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row

from dataserver.planning.balancing import longest_first
from dataserver.planning.job.fields import BalancePolicy
from dataserver.planning.layouts.pipelined.placing import (
    PlacementProblem,
    balanced,
    goal_ns,
    in_disttrain_order,
    lower_bound_ns,
    makespan_ns,
    searched,
    stratified,
)
from dataserver.planning.layouts.shared.waves import one_f_one_b_in_flight
from dataserver.planning.plan.placement import Placement
from planning_rows.strict_bound import component_bound_ns

UNIT_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """Steps of one size, with what is to be reached."""

    name: str
    dp: int
    microbatches: int
    stages: int
    seeds: range
    targets: Mapping[tuple[float, int], float]
    """Targets by coefficient of variation and extra microbatches in flight: makespan over bound, median."""
    gains: Mapping[tuple[float, int], float]
    """Gains by the same: how much faster than Algorithms 1 + 2, which have no extra in flight."""


A = Scenario(
    "scenario A",
    8,
    32,
    8,
    range(20),
    {(0.3, 0): 1.04, (0.6, 0): 1.10, (1.0, 0): 1.17, (0.3, 2): 1.015, (0.6, 2): 1.045, (1.0, 2): 1.09},
    {(0.6, 0): 1.02, (0.6, 2): 1.08},
)
HELD_OUT = Scenario(
    "its held-out variant",
    12,
    24,
    6,
    range(100, 120),
    {(0.45, 0): 1.07, (0.8, 0): 1.135, (0.45, 2): 1.03, (0.8, 2): 1.0675},
    {(0.45, 0): 1.02, (0.45, 2): 1.08},
)
"""Targets between those of scenario A, for coefficients of variation between its own."""


def instance(scenario: Scenario, variation: float, extra: int, seed: int) -> PlacementProblem:
    """Draw one instance of a scenario."""
    rng = np.random.default_rng(seed)
    sigma = np.sqrt(np.log(1 + variation**2))
    count = scenario.dp * scenario.microbatches
    encoder, own = (0.9 * np.exp(rng.normal(-(sigma**2) / 2, sigma, count)) for _ in range(2))
    times = np.stack([encoder, np.ones(count), 0.6 * encoder + 0.4 * own])
    nanoseconds = np.concatenate([times * UNIT_NS, np.zeros((3, 1))], axis=1).astype(np.int64)
    return PlacementProblem(
        dp=scenario.dp,
        num_waves=scenario.microbatches,
        slots=1,
        components=scenario.dp,
        num_stages=scenario.stages,
        num_encoders=1,
        in_flight=one_f_one_b_in_flight(scenario.stages + 2, extra),
        own=nanoseconds,
        way=nanoseconds[:, :-1],
        base=np.zeros(3, np.int64),
        chunks=1,
        percent=np.full(3, 200),
    )


def planned(problem: PlacementProblem, seed: int) -> Placement:
    """What the default policies of the newest version do."""
    best = min(starts_of(problem), key=lambda start: makespan_ns(problem, start))
    return searched(problem, best, seed, seed, goal=goal_ns(problem), patient=False, in_rounds=True)


def starts_of(problem: PlacementProblem) -> list[Placement]:
    """The rule-based placements that a search begins with the best of."""
    seeds = [balanced(problem, policy) for policy in (BalancePolicy.NONE, BalancePolicy.LPT)]
    seeds.append(stratified(problem))
    return [*seeds, *(in_disttrain_order(problem, s) for s in seeds)]


def at_random(problem: PlacementProblem, seed: int) -> Placement:
    """Assign sequences to ranks in random order."""
    return _filled(problem, np.random.default_rng(seed).permutation(problem.num_sequences))


def algorithm_1(problem: PlacementProblem, seed: int) -> Placement:
    """DistTrain's Algorithm 1 with equal counts on encoder + generator time, random order within a rank."""
    rank = longest_first(problem.own[0, :-1] + problem.own[2, :-1], problem.dp, problem.num_waves)
    shuffled = np.random.default_rng(seed).permutation(problem.num_sequences)
    return _filled(problem, shuffled[np.argsort(rank[shuffled], kind="stable")])


def algorithms_1_and_2(problem: PlacementProblem, seed: int) -> Placement:
    """Both of DistTrain's algorithms, as the paper has them."""
    return in_disttrain_order(problem, algorithm_1(problem, seed))


def _filled(problem: PlacementProblem, order: np.ndarray) -> Placement:
    """Sequences in this order, rank by rank and wave by wave."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return Placement(place // problem.num_waves, place % problem.num_waves, np.zeros_like(place))


def rows() -> list[Row]:
    """Scenario A and its held-out variant."""
    planned(instance(A, 0.6, 0, 0), 0)  # compiles
    return [row for scenario in (A, HELD_OUT) for row in _rows(scenario)]


def _rows(scenario: Scenario) -> list[Row]:
    found = []
    for (variation, extra), target in scenario.targets.items():
        problems = [instance(scenario, variation, extra, seed) for seed in scenario.seeds]
        strict = [instance(scenario, variation, 0, seed) for seed in scenario.seeds]
        bounds = [lower_bound_ns(p) for p in problems]
        ours, times = [], []
        for seed, problem in enumerate(problems):
            placement, spent = timed(planned, problem, seed)
            times.append(spent)
            ours.append(makespan_ns(problem, placement))
        ratios = [o / b for o, b in zip(ours, bounds, strict=True)]
        name = f"{scenario.name}, CV {variation}, {f'{extra} more in flight' if extra else 'strict 1F1B'}"
        text = f"{median(ratios):.4f} x bound, worst {max(ratios):.4f}, {median(times):.0f} ms of CPU"
        found.append(Row(name, text, f"median <= {target}", median(ratios) <= target))
        allowed = [component_bound_ns(p) for p in problems]
        reached = [o / a for o, a in zip(ours, allowed, strict=True)]
        least = median(a / b for a, b in zip(allowed, bounds, strict=True))
        text = f"{median(reached):.4f} x, worst {max(reached):.4f}; that bound is {least:.4f} x the one above"
        found.append(Row("  against what its schedule cannot beat", text, "", None))
        for label, rival in (
            ("random", at_random),
            ("Alg. 1 + random order", algorithm_1),
            ("Alg. 1 + 2", algorithms_1_and_2),
        ):
            theirs = [makespan_ns(p, rival(p, seed)) for seed, p in enumerate(strict)]
            gain = median(t / o for t, o in zip(theirs, ours, strict=True))
            against = median(t / b for t, b in zip(theirs, bounds, strict=True))
            wanted = scenario.gains.get((variation, extra)) if rival is algorithms_1_and_2 else None
            found.append(
                Row(
                    f"  against {label}",
                    f"{gain:.3f} x as fast ({against:.4f} x bound)",
                    f">= {wanted}" if wanted else "",
                    None if wanted is None else gain >= wanted,
                )
            )
    return found
