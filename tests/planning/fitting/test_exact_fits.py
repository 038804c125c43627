"""Fits of a few microbatches, digit by digit: against brute force over the sets of terms, and at every limit."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.fitting import fitting
from dataserver.planning.fitting.fitting import (
    LEAST_SHARE_PPM,
    MAX_TIME_NS,
    TERMS,
    FitError,
    TimingSamples,
    fit,
    nonnegative_least_squares,
)
from dataserver.planning.job.fields import Cost

Columns = Sequence[Sequence[int]]
UNIT = (1, 1_000, 1_000_000)
"""Of each term in a nanosecond: ns, ps, fs."""
MOST = (10**12, 10**11, 10**8)
"""That a job's cost may have."""


def measurements(rows: Sequence[tuple[int, int, int, int, int]]) -> TimingSamples:
    """From rows of count, total, squares, forward and backward time."""
    return TimingSamples(*np.array(rows, np.int64).reshape(-1, 5).T)


def dot(a: Sequence[Fraction | int], b: Sequence[Fraction | int]) -> Fraction:
    return sum((Fraction(x) * y for x, y in zip(a, b, strict=True)), Fraction(0))


def unexplained(column: Sequence[int], others: Columns) -> Fraction:
    """The part of a column's square that the others do not explain, by Gram and Schmidt."""
    basis: list[list[Fraction]] = []
    for vector in [*others, column]:
        rest = [Fraction(x) for x in vector]
        for b in basis:
            if dot(b, b):
                share = dot(vector, b) / dot(b, b)
                rest = [x - share * y for x, y in zip(rest, b, strict=True)]
        basis.append(rest)
    return dot(basis[-1], basis[-1]) / dot(column, column)


def best(columns: Columns, target: Sequence[int]) -> list[Fraction]:
    """Nonnegative least squares of independent columns: the best solution of any set of them that is not negative."""

    def solutions() -> Iterator[tuple[Fraction, list[Fraction]]]:
        for size in range(len(columns) + 1):
            for chosen in combinations(range(len(columns)), size):
                x = solve([columns[j] for j in chosen], target)
                if min(x, default=0) >= 0:
                    full = [Fraction(0)] * len(columns)
                    for j, value in zip(chosen, x, strict=True):
                        full[j] = value
                    residual = [
                        y - sum(c[i] * v for c, v in zip(columns, full, strict=True)) for i, y in enumerate(target)
                    ]
                    yield dot(residual, residual), full

    return min(solutions())[1]


def solve(columns: Columns, target: Sequence[int]) -> list[Fraction]:
    """Least squares by Cramer's rule."""
    gram = [[dot(a, b) for b in columns] for a in columns]
    moments = [dot(a, target) for a in columns]
    whole = determinant(gram)
    return [
        determinant([[*row[:j], moments[i], *row[j + 1 :]] for i, row in enumerate(gram)]) / whole
        for j in range(len(columns))
    ]


def determinant(rows: list[list[Fraction]]) -> Fraction:
    if not rows:
        return Fraction(1)
    minors = (determinant([row[:j] + row[j + 1 :] for row in rows[1:]]) for j in range(len(rows)))
    return sum((Fraction((-1) ** j) * rows[0][j] * minor for j, minor in enumerate(minors)), Fraction(0))


small = st.lists(st.integers(-4, 4), min_size=5, max_size=5)


@settings(max_examples=60)
@given(st.lists(small, min_size=1, max_size=3), small)
def test_nnls_is_the_best_of_all_sets_of_columns(columns: list[list[int]], target: list[int]) -> None:
    gram = [[int(dot(a, b)) for b in columns] for a in columns]
    if determinant([[Fraction(v) for v in row] for row in gram]):
        assert nonnegative_least_squares(gram, [int(dot(a, target)) for a in columns]) == best(columns, target)


def test_a_column_that_entered_too_early_leaves_again() -> None:
    """The first column looks best alone; with the two others it would be negative."""
    columns = [[3, 3, 4], [3, 0, 4], [0, 4, 1]]
    target = [3, 4, 5]
    gram = [[int(dot(a, b)) for b in columns] for a in columns]
    assert nonnegative_least_squares(gram, [int(dot(a, target)) for a in columns]) == best(columns, target)


row = st.tuples(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 9),
    st.integers(1, 400),
    st.integers(1, 90),
    st.integers(0, 200),
)


def expected_separable_terms(total: Sequence[int], squares: Sequence[int]) -> set[tuple[str, ...]]:
    columns, least = ([1] * len(total), total, squares), Fraction(LEAST_SHARE_PPM, 10**6)
    pairs = {(TERMS[i], TERMS[j]) for i, j in ((0, 1), (1, 2), (0, 2)) if unexplained(columns[i], [columns[j]]) < least}
    if not pairs and any(
        unexplained(columns[j], [c for k, c in enumerate(columns) if k != j]) < least for j in range(3)
    ):
        return {TERMS}
    return pairs


def test_squares_that_the_others_explain_are_enough_to_refuse() -> None:
    """What the others leave of the squares is too little here, and only of these."""
    found = [(1, 276, 28_745, 5_000, 5_000), (1, 129, 22_348, 4_000, 4_000), (1, 63, 19_669, 3_500, 3_500)]
    assert expected_separable_terms([r[1] for r in found], [r[2] for r in found]) == {TERMS}
    with pytest.raises(FitError, match=f"{', '.join(TERMS)} cannot be told apart"):
        fit(measurements(found))


@settings(max_examples=100)
@given(st.lists(row, min_size=3, max_size=5), st.sampled_from([1, 150, 300]), st.sampled_from([1, 2, 100]))
def test_fits_and_refusals_are_those_of_fractions(rows: list[tuple[int, ...]], middle: int, bend: int) -> None:
    """Totals near each other and squares near a multiple of them are refused; all else is fitted to the last digit."""
    found = [
        (count, middle + off, (middle + off) * middle // count + bend * wide * (off % 3), 10_000 + time, back)
        for count, wide, off, time, back, _ in rows
    ]
    total, squares, times = ([r[k] for r in found] for k in (1, 2, 3))
    separable = expected_separable_terms(total, squares)
    if separable:
        with pytest.raises(FitError) as refusal:
            fit(measurements(found))
        message = str(refusal.value)
        assert message.startswith(f"{len(rows)} microbatches do not determine the cost: ")
        told = {pair for pair in combinations(TERMS, 2) if f"{pair[0]} cannot be told from {pair[1]}" in message}
        assert told | ({TERMS} if f"{', '.join(TERMS)} cannot be told apart" in message else set()) == separable
        return
    columns = [[1] * len(total), total, squares]
    values = expected_cost(columns, times)
    if values is None:
        with pytest.raises(FitError, match="a cost that no job may have"):
            fit(measurements(found))
        return
    result = fit(measurements(found))
    assert [getattr(result.cost, term) for term in TERMS] == values
    assert result.cost.backward_percent == expected_percent(found)
    assert judged(result.cost, found) == (result.r2_ppm, result.residual_p50_ppm, result.residual_p90_ppm)
    assert (result.num_microbatches, result.num_outliers) == (len(rows), 0)


def expected_cost(columns: Columns, times: Sequence[int]) -> list[int] | None:
    """The best cost, the one term that may be beyond its limit at this limit; None where that is not enough."""
    values = [round(x * unit) for x, unit in zip(best(columns, times), UNIT, strict=True)]
    beyond = [j for j in range(3) if values[j] > MOST[j]]
    if not beyond:
        return values
    if len(beyond) > 1 or beyond == [0]:
        return None
    (fixed,) = beyond
    others = [j for j in range(3) if j != fixed]
    rest = [time - Fraction(x * MOST[fixed], UNIT[fixed]) for time, x in zip(times, columns[fixed], strict=True)]
    found = dict(zip(others, best([columns[j] for j in others], rest), strict=True))  # type: ignore[arg-type]
    values = [MOST[j] if j == fixed else round(found[j] * UNIT[j]) for j in range(3)]
    return values if all(value <= limit for value, limit in zip(values, MOST, strict=True)) else None


def expected_percent(rows: Sequence[tuple[int, ...]]) -> int:
    """The ratio at which half of all forward nanoseconds have a smaller or the same one."""
    half = Fraction(sum(r[3] for r in rows), 2)
    ratios = sorted(Fraction(r[4], r[3]) for r in rows)
    return round(100 * next(x for x in ratios if sum(r[3] for r in rows if Fraction(r[4], r[3]) <= x) >= half))


def test_a_term_beyond_its_limit_stays_there() -> None:
    """And the others are the best beside it."""
    rows = [(1, n, n * n, 200 * n * n + 10_000 * (n % 3), 0) for n in (10, 20, 31, 47)]
    columns = [[1] * len(rows), [r[1] for r in rows], [r[2] for r in rows]]
    found = fit(measurements(rows)).cost
    assert [getattr(found, term) for term in TERMS] == expected_cost(columns, [r[3] for r in rows])
    assert found.quadratic_fs == MOST[2]
    assert found.linear_ps > 1_000_000
    with pytest.raises(FitError, match=f"linear_ps .* .at most {MOST[1]}., quadratic_fs .* .at most {MOST[2]}."):
        fit(measurements([(1, n, n * n, 10**9 * n + 10**6 * n * n, 0) for n in (10, 20, 31, 47)]))


def judged(cost: Cost, rows: Sequence[tuple[int, ...]]) -> tuple[int, int, int]:
    """The three figures of a fit."""
    times = [r[3] for r in rows]
    errors = [
        abs(
            time
            - cost.microbatch_ns
            - Fraction(total * cost.linear_ps * 1_000 + squares * cost.quadratic_fs, 10**6).__floor__()
        )
        for _, total, squares, time, _ in rows
    ]
    mean = Fraction(sum(times), len(times))
    spread = sum((time - mean) ** 2 for time in times)
    r2 = 10**6 - (sum(e * e for e in errors) * 10**6 / spread).__floor__() if spread else 0
    shares = sorted(e * 10**6 // max(1, time) for e, time in zip(errors, times, strict=True))
    return r2, shares[ceil(len(shares) / 2) - 1], shares[ceil(len(shares) * 9 / 10) - 1]


ROWS = [(1, 10, 100, 1_000, 500), (2, 20, 200, 2_000, 1_500), (1, 30, 900, 4_000, 3_000), (3, 30, 300, 2_950, 3_100)]


def test_a_fit_in_digits() -> None:
    found = fit(measurements(ROWS))
    assert found.cost == Cost(microbatch_ns=33, linear_ps=80_139, quadratic_fs=1_736_111, backward_percent=75)
    assert (found.num_microbatches, found.r2_ppm) == (4, 999_916)
    assert (found.residual_p50_ppm, found.residual_p90_ppm) == (2_711, 8_500)


def test_microbatches_that_took_no_time_divide_by_one() -> None:
    rows = [*ROWS, (1, 5, 25, 0, 0)]
    found = fit(measurements(rows))
    assert judged(found.cost, rows) == (found.r2_ppm, found.residual_p50_ppm, found.residual_p90_ppm)


def test_equal_times_have_no_spread_to_explain() -> None:
    assert fit(measurements([(*r[:3], 700, 700) for r in ROWS])).r2_ppm == 0


def test_the_median_and_nine_tenths_of_eleven_microbatches() -> None:
    """Of 11, the 6th and the 10th."""
    rows = [(1, n, n * n, 1_000 + 7 * n * n + (n % 4) * 40, 0) for n in range(1, 12)]
    found = fit(measurements(rows))
    assert judged(found.cost, rows)[1:] == (found.residual_p50_ppm, found.residual_p90_ppm)
    assert 0 < found.residual_p50_ppm < found.residual_p90_ppm


# --- limits ---------------------------------------------------------------------------------------------------------


def test_limits_are_the_documented_ones() -> None:
    assert (MAX_TIME_NS, LEAST_SHARE_PPM) == (10**15, 10)
    assert TERMS == ("microbatch_ns", "linear_ps", "quadratic_fs")
    assert fit(measurements(ROWS)).cost.linear_ps == 80_139
    for time in (-1, 10**15 + 1):
        with pytest.raises(FitError, match=f"; 0 to {10**15} are possible"):
            measurements([*ROWS, (1, 1, 1, 1, time)])
    assert measurements([*ROWS, (1, 1, 1, 0, 10**15)]).backward_ns.max() == 10**15
    with pytest.raises(FitError, match="all items have about 30 patches"):
        fit(measurements([(n, 30 * n, 900 * n, 900 + n, 0) for n in range(1, 5)]))


@pytest.mark.parametrize("column", [3, 4])
@pytest.mark.parametrize("time", [-1, 0, 10**15, 10**15 + 1])
def test_times_at_their_limits(column: int, time: int) -> None:
    rows = [list(r) for r in ROWS]
    rows[1][column] = time
    if 0 <= time <= 10**15:
        assert measurements(rows).forward_ns[1] == rows[1][3]  # type: ignore[arg-type]
        return
    low, high = min(r[column] for r in rows), max(r[column] for r in rows)
    with pytest.raises(FitError) as refusal:
        measurements(rows)  # type: ignore[arg-type]
    assert str(refusal.value) == f"found times from {low} to {high} ns; 0 to {10**15} are possible"


def test_one_patch_is_enough_to_be_an_item() -> None:
    with pytest.raises(FitError, match="no microbatch holds an item"):
        fit(measurements([(0, 0, 0, 5, 5)] * 3))
    with pytest.raises(FitError, match="do not determine the cost"):
        fit(measurements([(1, 1, 1, 5, 5), (0, 0, 0, 5, 5)]))


def test_refusals_name_the_sizes_that_were_found() -> None:
    with pytest.raises(FitError) as refusal:
        fit(measurements([(1, 1_000, 10**6, 900, 0), (2, 1_001, 501_000, 950, 0), (4, 1_000, 251_000, 999, 0)]))
    assert str(refusal.value) == (
        "3 microbatches do not determine the cost: microbatch_ns cannot be told from linear_ps: every microbatch holds "
        "about 1000 to 1001 patches or tokens; report microbatches of other totals (another count of items)"
    )
    with pytest.raises(FitError) as refusal:
        fit(measurements([(1, 1_000, 10**6, 900, 0), (2, 2_001, 2_001_000, 950, 0), (4, 4_000, 4 * 10**6, 999, 0)]))
    assert str(refusal.value) == (
        "3 microbatches do not determine the cost: linear_ps cannot be told from quadratic_fs: all items have about "
        "1000 patches or tokens; report microbatches with items of other sizes"
    )


def test_a_cost_beyond_all_jobs_names_each_term_and_its_limit() -> None:
    with pytest.raises(FitError) as refusal:
        fit(measurements([(*r[:3], r[3] * 10**11, r[4]) for r in ROWS]))
    assert str(refusal.value).startswith(
        "the times give a cost that no job may have: microbatch_ns 3333333333333 (at most 1000000000000), linear_ps "
        "8013888888888889 (at most 100000000000), quadratic_fs 173611111111111111 (at most 100000000). They are not"
    )


def test_ten_millionths_of_a_column_are_enough() -> None:
    assert [fitting._too_small(part, 3_000_000) for part in (0, 29, 30, 31)] == [True, True, False, False]
    assert not fitting._too_small(10**30, 10**35)
    assert fitting._too_small(10**30 - 1, 10**35)
