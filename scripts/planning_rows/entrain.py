"""Rows about Entrain (arXiv 2605.27918): how evenly microbatches come out where encoder and backbone work disagree.

Its data set and kernel times are not public, so sizes are synthetic: two kinds of images, texts of their own.
"""

from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np
from benchmarks.rows import Row

from dataserver.planning import I64
from dataserver.planning.balancing import longest_first
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


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one size and skew."""

    dp: int
    microbatches: int
    slots: int
    stages: int
    sigma: float
    """Standard deviation of the logarithm of text lengths."""
    seeds: range

    @property
    def count(self) -> int:
        """Number of samples in a step."""
        return self.dp * self.microbatches * self.slots


CASES = Case(4, 32, 4, 4, 0.6, range(20)), Case(6, 16, 3, 6, 1.0, range(100, 120))
"""512 samples in 128 microbatches of four, as in the paper; and a held-out variant."""
EXCHANGES = 40_000
"""Tried to make microbatches alike."""


def rows() -> list[Row]:
    """All rows of this part; takes about ten seconds."""
    made = []
    methods = ("Alg. 1 + 2", _disttrain), ("microbatches made alike", _alike), ("ours", _default)
    for case, (label, method) in product(CASES, methods):
        name = f"two kinds of images, {case.count} samples on {case.dp} ranks x {case.stages} stages"
        ratios: list[float] = []
        encoder: list[float] = []
        backbone: list[float] = []
        for seed in case.seeds:
            problem = _problem(case, seed)
            placement, baseline = method(problem, seed), _disttrain(problem, seed)
            ratios.append(makespan_ns(problem, placement) / lower_bound_ns(problem))
            for row, found in enumerate((encoder, backbone)):
                found.append(_spread(problem, baseline, row) / _spread(problem, placement, row))
        text = (
            f"{median(ratios):.3f} x bound (worst {max(ratios):.3f}); standard deviation of a microbatch's time / "
            f"{median(encoder):.1f} (encoder), / {median(backbone):.1f} (backbone) of Alg. 1 + 2"
        )
        made.append(Row(f"{name}, {label}", text, "", None))
    return made


def _problem(case: Case, seed: int) -> PlacementProblem:
    """Seven small images for three large ones; texts log-normal; forward times of a small encoder and backbone."""
    rng, count = np.random.default_rng(seed), case.count
    large = rng.random(count) < 0.3
    patches = np.where(large, rng.normal(3_000, 300, count), rng.normal(600, 100, count)).clip(100)
    tokens = patches / 4 + np.exp(rng.normal(6, case.sigma, count))
    own = np.zeros((2, count + 1), np.int64)
    own[0, :-1] = patches * 1_000
    own[1, :-1] = tokens * 2_000
    held = one_f_one_b_in_flight(case.stages + 1)
    none, percent = np.zeros(2, np.int64), np.full(2, 200)
    return PlacementProblem(
        case.dp, case.microbatches, case.slots, case.dp, case.stages, 1, held, own, own[:, :-1], none, percent, 1
    )


def _disttrain(problem: PlacementProblem, seed: int) -> Placement:
    """Algorithm 1 over ranks, microbatches as they come, Algorithm 2."""
    rank = longest_first(problem.own[:, :-1].sum(axis=0), problem.dp, problem.num_waves * problem.slots)
    shuffled = np.random.default_rng([seed, 1]).permutation(problem.num_sequences)
    place = np.empty(problem.num_sequences, np.int64)
    place[shuffled[np.argsort(rank[shuffled], kind="stable")]] = np.arange(problem.num_sequences)
    within = place % (problem.num_waves * problem.slots)
    return in_disttrain_order(problem, Placement(rank, within // problem.slots, within % problem.slots))


def _alike(problem: PlacementProblem, seed: int) -> Placement:
    """Exchanges between microbatches that make them alike in both times, then Algorithm 2: Entrain's aim."""
    rng, count, slots = np.random.default_rng([seed, 2]), problem.num_sequences, problem.slots
    work = problem.own[:2, :-1] / problem.own[:2, :-1].mean(axis=1, keepdims=True)
    group = rng.permutation(count) // slots
    load = np.stack([np.bincount(group, w) for w in work])
    for a, b in rng.integers(0, count, (EXCHANGES, 2)):
        change = (work[:, b] - work[:, a]) * (group[a] != group[b])
        if (change * (load[:, group[a]] - load[:, group[b]] + change)).sum() < 0:
            load[:, group[a]] += change
            load[:, group[b]] -= change
            group[a], group[b] = group[b], group[a]
    place = np.empty(count, np.int64)
    place[np.argsort(group, kind="stable")] = np.arange(count)
    wave, rank = place // slots % problem.num_waves, place // (slots * problem.num_waves)
    return in_disttrain_order(problem, Placement(rank, wave, place % slots))


def _default(problem: PlacementProblem, seed: int) -> Placement:
    """What the default policies do."""
    seeds = [balanced(problem, policy) for policy in (BalancePolicy.NONE, BalancePolicy.LPT)]
    seeds.append(stratified(problem))
    seeds += [in_disttrain_order(problem, placement) for placement in seeds]
    best = min(seeds, key=lambda placement: makespan_ns(problem, placement))
    return searched(problem, best, seed, seed, patient=False)


def _spread(problem: PlacementProblem, placement: Placement, row: int) -> float:
    """Standard deviation over all microbatches of the time of one row of the problem."""
    times: I64 = np.zeros((problem.dp, problem.num_waves), np.int64)
    np.add.at(times, (placement.rank, placement.wave), problem.own[row, :-1])
    return float(times.std())
