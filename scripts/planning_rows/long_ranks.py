"""Rows of one rank with many microbatches, two more in flight than 1F1B asks for, against its bound."""

from dataclasses import dataclass
from statistics import median

from benchmarks.calibration import timed
from benchmarks.rows import Row

from dataserver.planning.layouts.pipelined.placing import (
    PlacementProblem,
    goal_ns,
    lower_bound_ns,
    makespan_ns,
    raced,
    searched,
)
from dataserver.planning.plan.placement import Placement
from planning_rows.optimiser import Scenario, algorithms_1_and_2, instance, starts_of

VARIATION, EXTRA = 0.6, 2
"""Coefficient of variation of encoder times, and microbatches in flight beyond those of 1F1B."""


@dataclass(frozen=True, slots=True)
class Long:
    """One rank of ten stages, encoder and generator included, or of another number in held-out variants."""

    microbatches: int
    stages: int
    seeds: range
    target: float | None
    """Step over bound, median; none for held-out variants, whose bound is another one."""


CASES = (
    Long(64, 8, range(300, 312), 1.015),
    Long(120, 8, range(300, 312), 1.037),
    Long(240, 8, range(300, 312), 1.054),
    Long(90, 6, range(400, 412), None),
)


def rows() -> list[Row]:
    """All rows of this part; takes seconds."""
    return [_row(case) for case in CASES]


def _row(case: Long) -> Row:
    ratios, by_rules, times = list[float](), list[float](), list[float]()
    shape = Scenario("one rank", 1, case.microbatches, case.stages, case.seeds, {}, {})
    for seed in case.seeds:
        problem = instance(shape, VARIATION, EXTRA, seed)
        bound, starts = lower_bound_ns(problem), starts_of(problem)
        placed, spent = timed(_searched, problem, starts, seed)
        times.append(spent)
        ratios.append(makespan_ns(problem, placed) / bound)
        by_rules.append(min(makespan_ns(problem, p) for p in (*starts, algorithms_1_and_2(problem, seed))) / bound)
    ahead = all(r <= b for r, b in zip(ratios, by_rules, strict=True))
    text = (
        f"{median(ratios):.4f} x bound, worst {max(ratios):.4f}, {median(times):.0f} ms; rules {median(by_rules):.4f}"
    )
    name = f"one rank, {case.stages} stages, {case.microbatches} microbatches, CV {VARIATION}, {EXTRA} more in flight"
    if case.target is None:
        return Row(f"  held out: {name}", text, "never behind rules", ahead)
    return Row(name, text, f"median <= {case.target}, never behind rules", ahead and median(ratios) <= case.target)


def _searched(problem: PlacementProblem, starts: list[Placement], seed: int) -> Placement:
    """As plans of the newest version search."""
    goal, best = goal_ns(problem), min(starts, key=lambda start: makespan_ns(problem, start))
    found = searched(problem, best, seed, seed, goal=goal, patient=False, in_rounds=True)
    return raced(problem, best, found, seed, seed, None, goal) or found
