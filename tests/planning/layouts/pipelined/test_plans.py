"""Pipelined plans: the bound, components as the search sees them, schedules, padded backbones, balancers by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders.arranged import arranged_module
from builders.jobs import TWO_DATASETS, job_data, make_job
from builders.pipelined import SCHEDULES, Step, equal_job, plan_or_message, steps, tight_steps
from builders.samples import make_samples, mixed_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.job.fields import BalancePolicy, ModuleKind
from dataserver.planning.job.identity import parse_job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.layouts.pipelined.placing import balanced, makespan_ns, placement_problem
from dataserver.planning.plan import arranging
from dataserver.planning.plan.plan import ModuleSchedule
from dataserver.planning.planner import baseline_plan, plan_step, timeline


@settings(max_examples=60, deadline=None)
@given(st.one_of(steps(several=True, schedules=SCHEDULES), tight_steps()))
def test_no_plan_is_faster_than_its_bound(step: Step) -> None:
    job, samples = step
    plan = plan_or_message(job, samples)
    if isinstance(plan, str):
        return
    bound = layout_of(job.spec.execution).lower_bound_ns(job, plan)
    assert 0 <= bound <= timeline(job.spec, plan).makespan_ns
    first, *others = plan.candidates or (None,)
    assert first is None or first.makespan_ns == timeline(job.spec, plan).makespan_ns
    assert all(first.makespan_ns <= c.makespan_ns for c in others if first is not None)


def test_the_bound_is_what_even_work_takes() -> None:
    # Four backbone stages with the same work for all: only the encoder's first and last microbatch come on top.
    job, samples = equal_job(8, {})
    plan = plan_step(job, 0, samples)
    simulated = timeline(job.spec, plan)
    work = int(simulated.timeline.busy_ns.max())
    ways = (simulated.pipeline.forward_ns + simulated.pipeline.backward_ns)[:, 0]
    assert layout_of(job.spec.execution).lower_bound_ns(job, plan) == work + int(ways[:4].sum())


@st.composite
def separate_components(draw: st.DrawFn) -> Step:
    """Jobs with as many ranks in every module, one sample in each microbatch, and no constant times."""
    dp, pp, waves = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    cost = {"linear_ps": 1_000_000, "quadratic_fs": 0}
    data = job_data(
        stream={
            "datasets": TWO_DATASETS,
            "seq_len": 2048,
            "global_batch": dp * waves,
            "packing": {"enabled": False},
            "generation": {"ratio": "0.5"},
        },
        execution={"layout": {"kind": "pipelined", "extra_in_flight": 0, "order": "none"}},
        encoder=dp,
        backbone=(dp, pp),
        generator=dp,
    )
    modules = data["execution"]["modules"]
    for name in draw(st.sets(st.sampled_from(["vit", "dit"]))):
        module = next(m for m in modules if m["name"] == name)
        modules.append({**module, "name": f"{name}-x", "datasets": ["x"]})
    frozen = draw(st.sets(st.sampled_from([m["name"] for m in modules]), max_size=len(modules) - 1))
    for module in modules:
        given = {"frozen": True} if module["name"] in frozen else {}
        percent = {} if given else {"backward_percent": draw(st.sampled_from([0, 100, 200]))}
        module |= {**given, "cost": {**cost, **percent}}
    job = parse_job(data)
    count = draw(st.integers(0, dp * waves))
    return job, mixed_samples(job, count, draw(st.integers(0, 2**32)), draw(st.integers(0, 3)))


@settings(max_examples=60, deadline=None)
@given(separate_components(), st.sampled_from([BalancePolicy.NONE, BalancePolicy.LPT]))
def test_a_component_is_simulated_as_the_whole_plan(step: Step, policy: BalancePolicy) -> None:
    """Where images stay within components of one rank of each module, the search's clock is that of the simulator."""
    job, samples = step
    execution = job.spec.execution
    planned = plan_step(job, 0, samples)
    modules = execution.by_depth
    held = np.concatenate([planned.in_flight(m.name) for m in modules])
    problem = placement_problem(job.spec, held, samples, np.arange(len(samples)), planned.num_microbatches)
    placement = balanced(problem, policy)
    backbone = arranging.arrange_samples(execution.backbone, samples, np.arange(len(samples)), placement)
    found = {
        m.name: arranged_module(job.spec, m, samples, backbone, execution.backbone.dp)
        for m in modules
        if m.kind is not ModuleKind.BACKBONE
    }
    plan = replace(
        planned,
        arrangements=(backbone, *(a for a, _ in found.values())),
        routings=tuple(r for _, r in found.values()),
        schedules=tuple(ModuleSchedule(m.name, planned.in_flight(m.name)) for m in modules),
    )
    assert makespan_ns(problem, placement) == timeline(job.spec, plan).makespan_ns


def test_interleaving_shortens_the_bubble() -> None:
    layouts: list[dict[str, Any]] = [
        {},
        {"schedule": "interleaved", "chunks": 2},
        {"schedule": "interleaved", "chunks": 4},
    ]
    idle = []
    for layout in layouts:
        data = job_data(
            stream={"global_batch": 8, "seq_len": 512, "packing": {"enabled": False}},
            execution={"layout": {"kind": "pipelined", **layout}},
            backbone=(1, 4),
            encoder=0,
        )
        data["execution"]["modules"][0]["cost"] = {"linear_ps": 16_000_000, "quadratic_fs": 0}
        _, samples = equal_job(8, {})
        job = parse_job(data)
        simulated = timeline(job.spec, plan_step(job, 0, samples)).timeline
        idle.append(simulated.makespan_ns - int(simulated.busy_ns.max()))
    work = 100 * 16_000 // 4 * 3
    assert idle == [3 * work, 3 * work // 2, 3 * work // 4]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_interleaved_microbatches_are_a_multiple_of_the_stages(pp: int) -> None:
    layout = {"kind": "pipelined", "schedule": "interleaved", "chunks": 2}
    job = make_job(
        stream={"global_batch": 10, "seq_len": 512, "packing": {"enabled": False}, "generation": {"ratio": "0.5"}},
        execution={"layout": layout},
        encoder=1,
        backbone=(2, pp),
        generator=2,
    )
    plan = plan_step(job, 0, make_samples(job, 10, 1, 2))
    assert plan.num_microbatches == -(-5 // pp) * pp
    assert {len(set(plan.in_flight(m).tolist())) for m in ("vit", "dit")} == {1}


def test_a_padded_backbone_gets_samples_of_like_length() -> None:
    gains = []
    for seed in range(6):
        data = job_data(
            stream={"global_batch": 64, "seq_len": 2048, "packing": {"enabled": False}},
            execution={"microbatch": 4},
            backbone=(4, 2),
        )
        data["execution"]["modules"][1]["padded"] = True
        job = parse_job(data)
        samples = make_samples(job, 64, seed, 2)
        before = timeline(job.spec, baseline_plan(job, 0, samples)).makespan_ns
        after = timeline(job.spec, plan_step(job, 0, samples)).makespan_ns
        gains.append(before / after)
    assert min(gains) >= 1
    assert sorted(gains)[2] > 1.3


def test_longest_first_evens_out_the_backbone() -> None:
    stream = {"global_batch": 48, "seq_len": 2048, "packing": {"enabled": False}}
    layout = {"kind": "pipelined", "order": "none"}
    job = make_job(stream=stream, execution={"layout": layout, "microbatch": 2}, backbone=(4, 2))
    plan = plan_step(job, 0, make_samples(job, 48, 1, 2))
    assert any(c.name.startswith("longest first") for c in plan.candidates)
    baseline = baseline_plan(job, 0, plan.samples)
    assert timeline(job.spec, plan).makespan_ns <= timeline(job.spec, baseline).makespan_ns


@pytest.mark.parametrize(
    ("balances", "said"),
    [
        (("none", "none"), {"images beside their sequences", "images dealt out evenly"}),
        (("even", "even"), {"images dealt out evenly"}),
        (("none", "lpt"), {"images over all ranks, of vit beside their sequences"}),
        (("lpt", "lpt"), {"images over all ranks"}),
    ],
)
def test_candidates_say_where_their_images_are(balances: tuple[str, str], said: set[str]) -> None:
    data = job_data(encoder=2, backbone=(3, 1), generator=2, stream={"generation": {"ratio": "0.5"}, "global_batch": 6})
    for module, balance in zip(data["execution"]["modules"][::2], balances, strict=True):
        module["balance"] = balance
    job = parse_job(data)
    names = [c.name for c in plan_step(job, 0, make_samples(job, 20)).candidates]
    assert all(any(f", {place}" in f"{name}," or name.endswith(place) for name in names) for place in said)
    everywhere = [name for name in names if "images over all ranks" in name]
    assert bool(everywhere) == ("lpt" in balances)
    assert all("of vit beside" in name for name in everywhere) or balances != ("none", "lpt")


def test_candidates_of_texts_say_nothing_of_images() -> None:
    job = make_job(encoder=0, backbone=(2, 2))
    plan = plan_step(job, 0, make_samples(job, 8, max_images=0))
    assert plan.candidates
    assert not any("image" in c.name for c in plan.candidates)
