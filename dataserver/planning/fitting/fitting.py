"""Costs found in measured times, for the specification of the next job; a running job's costs never change.

Time = microbatch_ns + linear x (sum of n) + quadratic x (sum of n^2) over the items of a microbatch, all coefficients
non-negative: the constant belongs to the microbatch and to no item (as in the cost model of NVIDIA's Cosmos framework,
which also checks the rank before it fits). Microbatches that something else slowed down are left out (`outliers`).
Computed in exact integers and fractions, like all of the planner: every machine finds the same cost, columns need no
scaling, and a test for zero needs no tolerance.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from pydantic import ValidationError

from dataserver.planning import I64
from dataserver.planning.balancing import bin_loads
from dataserver.planning.fitting.least_squares import dot, gram_matrix, nonnegative_least_squares
from dataserver.planning.fitting.outliers import Row, undisturbed
from dataserver.planning.job.fields import Cost, ModuleSpec
from dataserver.planning.plan.plan import StepPlan

TERMS: Final = ("microbatch_ns", "linear_ps", "quadratic_fs")
UNITS: Final = {"microbatch_ns": 1, "linear_ps": 1_000, "quadratic_fs": 1_000_000}
"""How many units of each term make a nanosecond."""
LEAST_SHARE_PPM: Final = 10
"""Least part of a column's square that the other columns do not explain: below, noise of 1 % decides what it costs."""
MAX_TIME_NS: Final = 10**15
"""Longest time of a microbatch that is taken for a measurement: eleven days."""


class FitError(ValueError):
    """Times from which no cost can be told; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class TimingSamples:
    """Microbatches of one module and what they took in all its stages together, int64 [m] each."""

    count: I64
    """Number of images or samples."""
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
    """Those that it was found in."""
    num_outliers: int
    """Those that were left out, because something else than their size decided their time."""
    r2_ppm: int
    """Coefficient of determination in millionths; negative if the mean alone would explain more."""
    residual_p50_ppm: int
    """Median of |measured - fitted| / measured, in millionths."""
    residual_p90_ppm: int
    """The same at nine tenths."""


def microbatch_sizes(plan: StepPlan, module: ModuleSpec) -> tuple[I64, I64, I64]:
    """Count, sum and sum of squares of the items of each microbatch of a module, int64 [dp, microbatches] each.

    Of sequences that ranks share each computes its part: an equal run of their tokens, and for attention all tokens of
    an equal part of the heads. What it waits for the others meanwhile is no part of the times that are reported.
    """
    arrangement = plan.arrangement(module.name)
    sizes = (plan.samples.tokens if module.holds_samples else plan.samples.patches)[arrangement.item]
    place = arrangement.rank * plan.num_microbatches + arrangement.microbatch
    depths = None if module.holds_samples else plan.samples.depths(arrangement.item)
    squares = sizes * sizes if depths is None else sizes * sizes // depths  # frames of a video see their own group
    values, places = (np.ones_like(sizes), sizes, squares), module.dp * plan.num_microbatches
    count, total, squares = (bin_loads(v, place, places).reshape(module.dp, -1) for v in values)
    if module.name == plan.groups.module:
        groups = zip(plan.groups.microbatch, plan.groups.first_rank, plan.groups.degree, strict=True)
        for microbatch, first, degree in groups:
            ranks, tokens = np.arange(degree), int(total[first, microbatch])
            where = first + ranks, microbatch
            count[where] = count[first, microbatch]
            total[where] = tokens * (ranks + 1) // degree - tokens * ranks // degree
            squares[where] = squares[first, microbatch] // degree
    return count, total, squares


def fit(measured: TimingSamples) -> Fit:
    """The cost that explains the times of undisturbed microbatches best, in the sense of least squares.

    A linear or a quadratic term that would be beyond what a job may have stays at its limit.

    Raises:
        FitError: the times do not tell the terms apart (which ones, and what data would), or are beyond any job's cost.
    """
    fields = (measured.total, measured.squares, measured.forward_ns)
    rows = [Row(*values) for values in zip(*(f.tolist() for f in fields), strict=True)]
    if not any(row.time for row in rows):
        raise FitError("no microbatch took any time; report forward times in nanoseconds")
    kept = np.array(undisturbed(rows))
    num_outliers = len(kept) - int(kept.sum())
    measured = TimingSamples(*(getattr(measured, name)[kept] for name in TimingSamples.__slots__))
    rows = [row for row, near in zip(rows, kept, strict=True) if near]
    columns, times = ([1] * len(rows), [r.total for r in rows], [r.squares for r in rows]), [r.time for r in rows]
    gram = gram_matrix(columns)
    _check_rank(gram, measured)
    return _judged(_cost(gram, [dot(c, times) for c in columns], _backward_percent(measured)), rows, num_outliers)


def _backward_percent(measured: TimingSamples) -> int:
    """The median of backward / forward, in which each nanosecond of forward counts as much."""
    pairs = zip(measured.backward_ns.tolist(), measured.forward_ns.tolist(), strict=True)
    ratios = sorted((backward * 1_000_000 // forward, backward, forward) for backward, forward in pairs if forward)
    passed, half = 0, sum(forward for _, _, forward in ratios)
    for _, backward, forward in ratios:
        passed += 2 * forward
        if passed >= half:
            return round(Fraction(100 * backward, forward))
    raise FitError("every microbatch that took any time was disturbed; report more steps")


def _cost(gram: list[list[int]], moments: list[int], percent: int) -> Cost:
    """Least squares over the costs that a job may have."""
    at_limit: dict[str, int] = {}
    while True:
        free = [j for j, term in enumerate(TERMS) if term not in at_limit]
        explained = [sum(gram[i][TERMS.index(t)] * Fraction(v, UNITS[t]) for t, v in at_limit.items()) for i in free]
        rest = [moments[i] - part for i, part in zip(free, explained, strict=True)]
        found = nonnegative_least_squares([[gram[i][j] for j in free] for i in free], rest)
        values = {TERMS[j]: round(x * UNITS[TERMS[j]]) for j, x in zip(free, found, strict=True)}
        try:
            return Cost(**at_limit, **values, backward_percent=percent)
        except ValidationError as error:
            beyond = {str(e["loc"][0]): (e["input"], e["ctx"]["le"]) for e in error.errors()}
        if at_limit or len(beyond) > 1 or not beyond.keys() <= {"linear_ps", "quadratic_fs"}:
            listed = ", ".join(f"{term} {value} (at most {limit})" for term, (value, limit) in beyond.items())
            raise FitError(
                f"the times give a cost that no job may have: {listed}. They are not in nanoseconds, or other things "
                "than the sizes decide them: report more steps, of larger items or from a quieter machine"
            )
        at_limit = {term: limit for term, (_, limit) in beyond.items()}


def _check_rank(gram: list[list[int]], measured: TimingSamples) -> None:
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


def _judged(cost: Cost, rows: list[Row], num_outliers: int) -> Fit:
    values, times = (cost.microbatch_ns, cost.linear_ps, cost.quadratic_fs), [row.time for row in rows]
    errors = [abs(row.time - row.expected(values) // 1_000_000) for row in rows]
    relative = sorted(error * 1_000_000 // max(time, 1) for error, time in zip(errors, times, strict=True))
    spread = len(times) * dot(times, times) - sum(times) ** 2
    missed = len(times) * dot(errors, errors)
    return Fit(
        cost=cost,
        num_microbatches=len(times),
        num_outliers=num_outliers,
        r2_ppm=1_000_000 - missed * 1_000_000 // spread if spread else 0,
        residual_p50_ppm=relative[-(-len(relative) // 2) - 1],
        residual_p90_ppm=relative[-(-len(relative) * 9 // 10) - 1],
    )
