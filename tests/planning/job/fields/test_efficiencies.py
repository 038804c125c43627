"""Attention that reaches another share of the peak than products with weights do."""

from fractions import Fraction
from typing import Any

import pytest
from builders.jobs import changed, job_data
from planning_rows.flexsp_profiles import PROFILES

from dataserver.planning.job.fields import Cost
from dataserver.planning.job.fields.hardware import PEAK_GIGAFLOPS, ModelSize, coefficients, linear_flops, pair_flops
from dataserver.planning.job.identity import JobSpecError, canonical_json, parse_job

COST = ("execution", "modules", 1, "cost")
LLAMA: dict[str, Any] = {"model": "llama3-7b", "device": "h100", "efficiency": "0.4"}


def cost_of(cost: dict[str, Any]) -> Cost:
    return parse_job(changed(job_data(), COST, cost)).spec.execution.backbone.cost


def test_attention_at_half_the_efficiency_costs_twice_as_much() -> None:
    plain, slower = cost_of(LLAMA), cost_of(LLAMA | {"attention_efficiency": "0.2"})
    assert slower.linear_ps == plain.linear_ps
    assert 0 <= 2 * plain.quadratic_fs - slower.quadratic_fs <= 1  # rounded up once each
    by_hand = coefficients("backbone", "llama3-7b", "h100", Fraction("0.4"), 1, Fraction("0.2"))
    assert (slower.linear_ps, slower.quadratic_fs) == (by_hand.linear_ps, by_hand.quadratic_fs)


def test_only_integers_reach_the_identity() -> None:
    named = parse_job(changed(job_data(), COST, LLAMA))
    same = parse_job(changed(job_data(), COST, LLAMA | {"attention_efficiency": "0.40"}))
    assert same.job_id == named.job_id
    assert b"efficiency" not in canonical_json(same.spec)


@pytest.mark.parametrize("value", ["0", "1.01"])
def test_shares_lie_above_0_and_up_to_1(value: str) -> None:
    with pytest.raises(JobSpecError, match=rf"attention_efficiency is {value}; a value in \(0, 1\] is required"):
        cost_of(LLAMA | {"attention_efficiency": value})


@pytest.mark.parametrize(
    ("name", "linear", "attention", "weight"),
    [
        ("7b-192k", "0.673", "0.492", "1.37"),
        ("13b-192k", "0.791", "0.424", "1.86"),
        ("30b-192k", "0.763", "0.498", "1.53"),
    ],
)
def test_efficiencies_of_flexsps_fit(name: str, linear: str, attention: str, weight: str) -> None:
    """FlexSP's measured coefficients on A100 (arXiv 2412.01523), as shares of the peak; one of both would not do.

    A GPT has 12 x width^2 weights in a layer and a causal mask; the paper's times are forward and backward, three
    forwards.
    """
    profile = PROFILES[name]
    size = ModelSize(profile.layers, profile.hidden, 4 * profile.hidden, 1, 1, causal=True)
    peak = PEAK_GIGAFLOPS["a800"]
    found = Fraction(3 * linear_flops("tower", size) * 10**3, profile.linear_ps * peak)
    of_attention = Fraction(3 * pair_flops("tower", size) * 10**6, profile.quadratic_fs * peak)
    assert abs(found - Fraction(linear)) < Fraction(1, 1000)
    assert abs(of_attention - Fraction(attention)) < Fraction(1, 1000)
    assert abs(found / of_attention - Fraction(weight)) < Fraction(1, 100)
