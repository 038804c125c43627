"""Costs found in measured times: exact, near, or refused with what is missing."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from builders.jobs import make_job
from builders.samples import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from dataserver.planning.costs.model import backward_ns, forward_ns
from dataserver.planning.fitting.fitting import (
    MAX_TIME_NS,
    Fit,
    FitError,
    TimingSamples,
    _backward_percent,
    fit,
    microbatch_sizes,
    nonnegative_least_squares,
)
from dataserver.planning.job.fields import Cost, ModuleKind
from dataserver.planning.planner import module_loads, plan_step

TRUE = Cost(microbatch_ns=320_000, linear_ps=3_179_430, quadratic_fs=413_989, backward_percent=100)


def samples_of(sizes: list[np.ndarray], cost: Cost = TRUE, noise: float = 0, seed: int = 0) -> TimingSamples:
    """Microbatches of these sizes, timed as the cost says, with multiplicative noise of that deviation."""
    forward = np.array([cost.microbatch_ns + int(forward_ns(cost, s).sum()) for s in sizes])
    factor = 1 + noise * np.random.default_rng(seed).standard_normal((2, len(sizes)))
    return TimingSamples(
        count=np.array([len(s) for s in sizes]),
        total=np.array([s.sum() for s in sizes]),
        squares=np.array([(s * s).sum() for s in sizes]),
        forward_ns=np.rint(forward * factor[0]).astype(np.int64),
        backward_ns=np.rint(backward_ns(cost, forward) * factor[1]).astype(np.int64),
    )


def random_sizes(num: int, seed: int = 0, low: int = 64, high: int = 4096) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(low, high, rng.integers(1, 9)) for _ in range(num)]


# --- least squares --------------------------------------------------------------------------------------------------


def solve(columns: np.ndarray, target: np.ndarray) -> list[Fraction]:
    a, y = columns.astype(object), target.astype(object)
    return nonnegative_least_squares((a.T @ a).tolist(), (a.T @ y).tolist())


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_nnls_is_scipys(size: int, more: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.integers(-50, 51, (size + more, size))
    target = rng.integers(-100, 101, size + more)
    found = solve(columns, target)
    expected, norm = nnls(columns.astype(float), target.astype(float))
    assert min(found) >= 0
    residual = np.linalg.norm(columns @ np.array(found, float) - target)
    assert residual == pytest.approx(norm, rel=1e-9, abs=1e-7)
    if np.linalg.cond(columns) < 1e5:
        assert np.array(found, float) == pytest.approx(expected, rel=1e-7, abs=1e-8)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.booleans())
def test_nnls_meets_the_conditions_of_an_optimum_exactly(size: int, seed: int, dependent: bool) -> None:
    """Karush-Kuhn-Tucker: no gradient where x > 0, none that would pay where x = 0. Dependent columns do no harm."""
    rng = np.random.default_rng(seed)
    columns = rng.integers(-9, 10, (size + 3, size))
    if dependent:
        columns = np.concatenate([columns, columns[:, :1] * 2, np.zeros((size + 3, 1), int)], axis=1)
    target = rng.integers(-99, 100, size + 3)
    x = solve(columns, target)
    a = columns.astype(object)
    gradient = a.T @ (target.astype(object) - a @ np.array(x, object))
    assert all(g == 0 if v > 0 else g <= 0 and v == 0 for v, g in zip(x, gradient, strict=True))


def test_columns_of_any_scale() -> None:
    sizes = [np.array([2**22]), np.array([1]), np.array([2**21, 5]), np.array([77, 78, 79])]
    found = solve(np.array([[1, int(s.sum()), int((s * s).sum())] for s in sizes], object), np.array([1, 2, 3, 4]))
    assert min(found) >= 0


# --- fits -----------------------------------------------------------------------------------------------------------


def near(found: Fit, parts: float) -> bool:
    fields = ("linear_ps", "quadratic_fs")
    return all(abs(getattr(found.cost, f) / getattr(TRUE, f) - 1) <= parts for f in fields)


def test_times_without_noise_give_the_cost_back() -> None:
    found = fit(samples_of(random_sizes(200)))
    assert near(found, 1e-6)
    assert abs(found.cost.microbatch_ns - TRUE.microbatch_ns) <= 20, "items are rounded down to nanoseconds"
    assert found.cost.backward_percent == 100
    assert found.num_microbatches == 200
    assert found.r2_ppm >= 999_999
    assert found.residual_p90_ppm <= 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_the_cost_no_more_than_least_squares_must(seed: int) -> None:
    measured = samples_of(random_sizes(2000, seed), noise=0.03, seed=seed)
    found = fit(measured)
    # Covariance of ordinary least squares under noise of another deviation in each row (White 1980, theorem 1).
    columns = np.stack([np.ones(2000), measured.total / 1e3, measured.squares / 1e6], axis=1)
    inverse = np.linalg.inv(columns.T @ columns)
    variance = inverse @ (columns.T * (0.03 * measured.forward_ns) ** 2 @ columns) @ inverse
    error = [getattr(found.cost, f) - getattr(TRUE, f) for f in ("microbatch_ns", "linear_ps", "quadratic_fs")]
    assert (np.abs(error) <= 4 * np.sqrt(np.diag(variance))).all()
    assert found.cost.backward_percent in (99, 100, 101)
    assert 0.98e6 < found.r2_ppm < 1e6
    # Of a normal deviate, half lie within 0.674 and nine tenths within 1.645 standard deviations.
    assert found.residual_p50_ppm == pytest.approx(0.674 * 0.03e6, rel=0.15)
    assert found.residual_p90_ppm == pytest.approx(1.645 * 0.03e6, rel=0.15)


def test_terms_that_are_not_there_are_zero_never_negative() -> None:
    linear = Cost(linear_ps=5_000_000, quadratic_fs=0)
    found = fit(samples_of(random_sizes(300), linear, noise=0.05, seed=3)).cost
    assert min(found.microbatch_ns, found.linear_ps, found.quadratic_fs) >= 0
    quadratic = Cost(linear_ps=0, quadratic_fs=900_000, microbatch_ns=0)
    assert fit(samples_of(random_sizes(300), quadratic)).cost.linear_ps <= 20


def test_the_largest_sizes_do_not_overflow() -> None:
    found = fit(samples_of(random_sizes(60, 1, 2**20, 2**22)))
    assert near(found, 1e-6)


def test_microbatches_without_items_tell_the_constant() -> None:
    sizes = [*random_sizes(40), *[np.empty(0, np.int64)] * 10]
    assert abs(fit(samples_of(sizes)).cost.microbatch_ns - TRUE.microbatch_ns) <= 20


# --- refusals -------------------------------------------------------------------------------------------------------


def test_one_size_cannot_tell_linear_from_quadratic() -> None:
    with pytest.raises(FitError) as refusal:
        fit(samples_of([np.full(n, 1024) for n in (1, 2, 3, 5, 8)]))
    assert "linear_ps cannot be told from quadratic_fs: all items have about 1024" in str(refusal.value)
    assert "items of other sizes" in str(refusal.value)
    assert "microbatch_ns" not in str(refusal.value)


def test_one_total_cannot_tell_the_constant_from_linear() -> None:
    sizes = [np.array([a, 4096 - a]) for a in (100, 500, 900, 2000)]
    with pytest.raises(FitError, match=r"microbatch_ns cannot be told from linear_ps: .* about 4096 .* other totals"):
        fit(samples_of(sizes))


def test_one_size_and_one_count_tell_nothing() -> None:
    with pytest.raises(FitError) as refusal:
        fit(samples_of([np.full(4, 1024)] * 9))
    for i, j in (("microbatch_ns", "linear_ps"), ("linear_ps", "quadratic_fs"), ("microbatch_ns", "quadratic_fs")):
        assert f"{i} cannot be told from {j}" in str(refusal.value)


def test_all_three_may_depend_on_each_other() -> None:
    # Two kinds of microbatch: any two columns differ, but two rows cannot tell three terms.
    sizes = [np.array([100]), np.array([300, 50])] * 5
    with pytest.raises(FitError, match=r"cannot be told apart: .* differ both in the count and in the sizes"):
        fit(samples_of(sizes))
    fit(samples_of([*sizes, np.array([900])]))


def test_sizes_that_are_nearly_the_same_are_refused_whatever_the_noise() -> None:
    rng = np.random.default_rng(0)
    sizes = [rng.integers(1023, 1026, rng.integers(1, 9)) for _ in range(500)]
    with pytest.raises(FitError, match="linear_ps cannot be told from quadratic_fs"):
        fit(samples_of(sizes, noise=0.02))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total": 0, "squares": 0, "count": 0}, "no microbatch holds an item, so only microbatch_ns can be told"),
        ({"forward_ns": 0}, "no microbatch took any time"),
        ({"forward_ns": -1}, "found times from -1 to -1 ns; 0 to "),
        ({"backward_ns": MAX_TIME_NS + 1}, "found times from"),
        ({"backward_ns": MAX_TIME_NS}, r"no job may have: backward_percent \d+"),
    ],
)
def test_times_that_cannot_be(changes: dict[str, int], message: str) -> None:
    fields: dict[str, Any] = {f: getattr(samples_of(random_sizes(9)), f) for f in TimingSamples.__slots__}
    with pytest.raises(FitError, match=message):
        fit(TimingSamples(**{f: np.full_like(v, changes[f]) if f in changes else v for f, v in fields.items()}))


def test_no_microbatch_at_all() -> None:
    with pytest.raises(FitError, match="no microbatch took any time"):
        fit(TimingSamples(*np.empty((5, 0), np.int64)))


# --- of a plan ------------------------------------------------------------------------------------------------------


def test_sizes_of_a_plans_microbatches() -> None:
    job = make_job(stream={"global_batch": 8, "packing": {"enabled": False}}, encoder=3, backbone=(2, 2))
    plan = plan_step(job, 0, make_samples(job, 8, seed=4, max_images=1))
    for module in job.spec.execution.modules:
        count, total, squares = microbatch_sizes(plan, module)
        assert count.shape == (module.dp, plan.num_microbatches)
        assert count.sum() == (8 if module.kind is ModuleKind.BACKBONE else len(plan.samples.patches))
        assert (squares >= total).all()
        assert (total[count == 0] == 0).all()
        times = (5 + 2 * total).sum(axis=1)
        assert times.tolist() == module_loads(with_cost(job, module.name), plan)[module.name].tolist()


def with_cost(job: Any, name: str) -> Any:
    """The specification with a linear cost of that module, free of rounding."""
    spec = job.spec
    cost = Cost(microbatch_ns=5, linear_ps=2_000, quadratic_fs=0)
    modules = tuple(m.model_copy(update={"cost": cost}) if m.name == name else m for m in spec.execution.modules)
    return spec.model_copy(update={"execution": spec.execution.model_copy(update={"modules": modules})})


def test_a_fit_needs_a_microbatch_that_took_time() -> None:
    nothing = np.zeros(3, np.int64)
    with pytest.raises(FitError, match=r"^every microbatch that took any time was disturbed; report more steps$"):
        _backward_percent(TimingSamples(nothing + 1, nothing, nothing, nothing, nothing))


def test_the_percent_of_the_backward_is_the_median_nanosecond() -> None:
    def percent(*pairs: tuple[int, int]) -> int:
        forward, backward = (np.array(values, np.int64) for values in zip(*pairs, strict=True))
        ones = np.ones(len(pairs), np.int64)
        return _backward_percent(TimingSamples(ones, ones, ones, forward, backward))

    assert percent((10, 21)) == 210
    assert percent((10, 10), (10, 20), (0, 99)) == 100
    assert percent((9, 9), (10, 20)) == 200
    assert percent((10, 10), (5, 10), (5, 15)) == 100
    assert percent((10, 10), (6, 12), (5, 15)) == 200
    assert percent((3, 2), (3, 2)) == 67
