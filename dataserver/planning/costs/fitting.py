"""Costs found in measured times, for the specification of the next job; a running job's costs never change.

Time = microbatch_ns + linear x (sum of n) + quadratic x (sum of n^2) over the items of a microbatch, all coefficients
non-negative: the constant belongs to the microbatch and to no item (as in the cost model of NVIDIA's Cosmos framework,
which also checks the rank before it fits). Computed in exact integers and fractions, like all of the planner: every
machine finds the same cost, columns need no scaling, and a test for zero needs no tolerance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import mul
from typing import Final

import numpy as np
from pydantic import ValidationError

from dataserver.planning.balancing import bin_loads
from dataserver.planning.jobspec import Cost, ModuleSpec
from dataserver.planning.plan import StepPlan
from dataserver.planning.samples import I64

TERMS: Final = ("microbatch_ns", "linear_ps", "quadratic_fs")
LEAST_SHARE_PPM: Final = 10
"""Least part of a column's square that the other columns do not explain: below, noise of 1 % decides what it costs."""
MAX_TIME_NS: Final = 10**15
"""Longest time of a microbatch that is taken for a measurement: eleven days."""


class FitError(ValueError):
    """Times from which no cost can be told; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Microbatches of one module and what they took in all its stages together, int64 [m] each."""

    count: I64
    """Images or samples."""
    total: I64
    """Sum of their patches or tokens."""
    squares: I64
    """Sum of the squares of their patches or tokens."""
    forward_ns: I64
    backward_ns: I64

    def __post_init__(self) -> None:
        for times in (self.forward_ns, self.backward_ns):
            if len(times) and not 0 <= int(times.min()) <= int(times.max()) <= MAX_TIME_NS:
                raise FitError(f"found times from {times.min()} to {times.max()} ns; 0 to {MAX_TIME_NS} are possible")


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost and how well it explains the forward times that it was found in."""

    cost: Cost
    num_microbatches: int
    r2_ppm: int
    """Coefficient of determination in millionths; negative if the mean alone would explain more."""
    residual_p50_ppm: int
    """Median of |measured - fitted| / measured, in millionths."""
    residual_p90_ppm: int
    """The same at nine tenths."""


def microbatch_sizes(plan: StepPlan, module: ModuleSpec) -> tuple[I64, I64, I64]:
    """Count, sum and sum of squares of the items of each microbatch of a module, int64 [dp, microbatches] each."""
    arrangement = plan.arrangement(module.name)
    sizes = (plan.samples.tokens if module.holds_samples else plan.samples.patches)[arrangement.item]
    place = arrangement.rank * plan.num_microbatches + arrangement.microbatch
    values, places = (np.ones_like(sizes), sizes, sizes * sizes), module.dp * plan.num_microbatches
    count, total, squares = (bin_loads(v, place, places).reshape(module.dp, -1) for v in values)
    return count, total, squares


def fit(measured: Measurements) -> Fit:
    """The cost that explains measured times best, in the sense of least squares.

    Raises:
        FitError: the times do not tell the terms apart (which ones, and what data would), or are beyond any job's cost.
    """
    total, squares, times = (v.tolist() for v in (measured.total, measured.squares, measured.forward_ns))
    if not sum(times):
        raise FitError("no microbatch took any time; report forward times in nanoseconds")
    columns = ([1] * len(times), total, squares)
    gram = [[_dot(a, b) for b in columns] for a in columns]
    _check_rank(gram, measured)
    found = nonnegative_least_squares(gram, [_dot(a, times) for a in columns])
    values = [round(x * scale) for x, scale in zip(found, (1, 1_000, 1_000_000), strict=True)]
    percent = round(Fraction(100 * sum(measured.backward_ns.tolist()), sum(times)))
    try:
        cost = Cost(**dict(zip(TERMS, values, strict=True)), backward_percent=percent)
    except ValidationError as error:
        beyond = ", ".join(f"{e['loc'][0]} {e['input']} (at most {e['ctx']['le']})" for e in error.errors())
        raise FitError(
            f"the times give a cost that no job may have: {beyond}. They are not in nanoseconds, or other things "
            "than the sizes decide them: report more steps, of larger items or from a quieter machine"
        ) from None
    return _judged(cost, times, total, squares)


def nonnegative_least_squares(gram: Sequence[Sequence[int]], moments: Sequence[int]) -> list[Fraction]:
    """Minimise |A x - y| over x >= 0, given A'A and A'y (Lawson and Hanson 1974, section 23.3), exactly.

    In exact arithmetic a column that depends on the active ones has no gradient, so that none ever enters.
    """
    size = len(moments)
    x, active = [Fraction(0)] * size, list[int]()
    while True:
        gradient = [moments[j] - sum(map(mul, gram[j], x)) for j in range(size)]
        rising = [j for j in range(size) if j not in active and gradient[j] > 0]
        if not rising:
            return x
        active.append(max(rising, key=lambda j: gradient[j] ** 2 * Fraction(1, gram[j][j])))
        while min(z := _solved(gram, moments, active)) <= 0:
            shrinking = [(j, goal) for j, goal in zip(active, z, strict=True) if goal <= 0]
            step = min(Fraction(x[j], x[j] - goal) for j, goal in shrinking)
            for j, goal in zip(active, z, strict=True):
                x[j] += step * (goal - x[j])
            active = [j for j in active if x[j] > 0]
        for j, goal in zip(active, z, strict=True):
            x[j] = goal


def _solved(gram: Sequence[Sequence[int]], moments: Sequence[int], active: list[int]) -> list[Fraction]:
    """Solution of the normal equations of the active columns, which are independent."""
    rows = [[*(Fraction(gram[i][j]) for j in active), Fraction(moments[i])] for i in active]
    for i, row in enumerate(rows):
        inverse = Fraction(row[i].denominator, row[i].numerator)
        rows[i] = [value * inverse for value in row]
        for k, other in enumerate(rows):
            if k != i:
                rows[k] = [b - other[i] * a for a, b in zip(rows[i], other, strict=True)]
    return [row[-1] for row in rows]


def _check_rank(gram: list[list[int]], measured: Measurements) -> None:
    """Refuse times in which a term cannot be told from others, naming the terms and what is missing."""
    if gram[1][1] == 0:
        raise FitError("no microbatch holds an item, so only microbatch_ns can be told; report steps with items")
    advice = {
        (0, 1): f": every microbatch holds about {_about(measured.total)} patches or tokens; "
        "report microbatches of other totals (another count of items)",
        (1, 2): f": all items have about {int(measured.total.sum()) // int(measured.count.sum())} patches or tokens; "
        "report microbatches with items of other sizes",
    }
    problems = []
    for i, j in ((0, 1), (1, 2), (0, 2)):
        square = gram[i][i] * gram[j][j]
        if _too_small(square - gram[i][j] ** 2, square):
            problems.append(f"{TERMS[i]} cannot be told from {TERMS[j]}" + advice.get((i, j), ""))
    if not problems:
        a, b, c = gram
        minors = [b[1] * c[2] - b[2] ** 2, a[0] * c[2] - a[2] ** 2, a[0] * b[1] - a[1] ** 2]
        volume = a[0] * minors[0] - a[1] * (a[1] * c[2] - b[2] * a[2]) + a[2] * (a[1] * b[2] - b[1] * a[2])
        if any(_too_small(volume, gram[j][j] * minors[j]) for j in range(3)):
            problems.append(
                f"{', '.join(TERMS)} cannot be told apart: sums of sizes and of their squares change together; report "
                "microbatches that differ both in the count and in the sizes of their items"
            )
    if problems:
        raise FitError(f"{len(measured.total)} microbatches do not determine the cost: {'; '.join(problems)}")


def _too_small(part: int, whole: int) -> bool:
    return part * 1_000_000 < whole * LEAST_SHARE_PPM


def _about(values: I64) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


def _judged(cost: Cost, times: list[int], total: list[int], squares: list[int]) -> Fit:
    fitted = [
        cost.microbatch_ns + (t * cost.linear_ps * 1_000 + s * cost.quadratic_fs) // 1_000_000
        for t, s in zip(total, squares, strict=True)
    ]
    errors = [abs(a - b) for a, b in zip(times, fitted, strict=True)]
    relative = sorted(error * 1_000_000 // max(time, 1) for error, time in zip(errors, times, strict=True))
    spread = len(times) * _dot(times, times) - sum(times) ** 2
    missed = len(times) * _dot(errors, errors)
    return Fit(
        cost=cost,
        num_microbatches=len(times),
        r2_ppm=1_000_000 - missed * 1_000_000 // spread if spread else 0,
        residual_p50_ppm=relative[-(-len(relative) // 2) - 1],
        residual_p90_ppm=relative[-(-len(relative) * 9 // 10) - 1],
    )


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(map(mul, a, b))
