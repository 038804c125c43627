"""Identity routing: images on the rank of their sequence, which runs encoder and first stage in turn."""

from typing import Any

import numpy as np
import pytest
from builders.jobs import Data, compose_whole, job_data, module
from builders.pipelined import Step
from builders.samples import make_samples
from builders.whole_ranks import whole_steps
from hypothesis import given, settings

from dataserver.planning.job.identity import Job, identify, parse_job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.layouts.pipelined.placing import balanced, makespan_ns, placement_problem
from dataserver.planning.layouts.shared.sequences import sequence_of_samples
from dataserver.planning.plan.expectation import microbatch_loads
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.samples import StepSamples
from dataserver.reporting.alternatives import alternatives_of, changes


def check_beside(plan: StepPlan) -> None:
    for routing in plan.routings:
        for end in ("rank", "microbatch", "start"):
            assert getattr(routing, f"source_{end}").tolist() == getattr(routing, f"target_{end}").tolist()


@settings(max_examples=50, deadline=None)
@given(whole_steps(identity=True))
def test_every_image_is_where_its_sequence_is(step: Step) -> None:
    job, samples = step
    plan = plan_step(job, 3, samples)
    check_beside(plan)
    assert sum(len(r.rows) for r in plan.routings) == len(samples.image_rows)
    bound = layout_of(job.spec.execution).lower_bound_ns(job, plan)
    assert 0 < bound <= timeline(job.spec, plan).makespan_ns
    assert all(plan.candidates[0].makespan_ns <= c.makespan_ns for c in plan.candidates)


def both_ns(job: Job, plan: StepPlan) -> Any:
    """int64 [dp, microbatches]: forward and backward of all modules."""
    modules = job.spec.execution.modules
    loads = [microbatch_loads(m, plan) for m in modules]
    return sum(n + n * m.cost.backward_percent // 100 for m, n in zip(modules, loads, strict=True))


def mixture(dp: int, pp: int = 1, **execution: Any) -> tuple[Job, StepSamples]:
    data = job_data(
        stream={"seq_len": 900, "global_batch": 6 * dp, "sizing": {"max_patches": 256}},
        execution={"identity_routing": True, **execution},
        encoder=dp,
        backbone=(dp, pp),
    )
    job = parse_job(data)
    return job, make_samples(job, 24 * dp, 1, 2)


def test_a_rank_takes_what_all_its_modules_take_together() -> None:
    job, samples = mixture(4)
    plan = plan_step(job, 0, samples)
    assert timeline(job.spec, plan).makespan_ns == int(both_ns(job, plan).sum(axis=1).max())


def test_ranks_are_balanced_by_all_that_they_run() -> None:
    """Beside the plan of the same job for modules on devices of their own, its images brought back to their ranks."""
    job, samples = mixture(4, layout={"kind": "pipelined", "order": "none"})
    data = job.spec.model_dump(mode="json")
    data["stream"]["packing"]["enabled"] = False
    data["execution"]["modules"][0]["cost"]["linear_ps"] *= 40
    whole = parse_job(data)
    data["execution"]["modules"][0]["balance"] = "lpt"
    apart = parse_job({**data, "execution": {**data["execution"], "identity_routing": None}})
    plans = [plan_step(each, 0, samples) for each in (whole, apart)]
    worst, other = (both_ns(whole, plan).sum(axis=1).max() / both_ns(whole, plan).sum(axis=1).mean() for plan in plans)
    assert worst < 1.01 < other
    bound = layout_of(whole.spec.execution).lower_bound_ns(whole, plans[0])
    assert bound > 0.98 * timeline(whole.spec, plans[0]).makespan_ns


@settings(max_examples=50, deadline=None)
@given(whole_steps(parity=False, identity=True))
def test_the_clock_of_the_search_is_that_of_the_simulator(step: Step) -> None:
    job, samples = step
    execution = job.spec.execution
    plan = plan_step(job, 3, samples)
    if execution.layout.num_chunks > 1 or any(m.padded for m in execution.modules):
        return
    held = np.concatenate([plan.in_flight(m.name) for m in execution.by_depth])
    sequence = sequence_of_samples(plan, execution.backbone.name)
    problem = placement_problem(job.spec, held, samples, sequence, plan.num_microbatches)
    backbone = plan.arrangement(execution.backbone.name)
    placement = balanced(problem, execution.backbone.balance)
    for number in set(sequence.tolist()):
        at = np.flatnonzero(sequence[backbone.item] == number)[0]
        for field, found in (("rank", backbone.rank), ("wave", backbone.microbatch), ("slot", backbone.slot)):
            getattr(placement, field)[number] = found[at]
    assert abs(makespan_ns(problem, placement) - timeline(job.spec, plan).makespan_ns) <= rounding(job, plan)


def rounding(job: Job, plan: StepPlan) -> int:
    """Nanoseconds by which sums of shares differ from shares of sums."""
    return (
        4 * plan.num_microbatches * (len(plan.samples) + len(plan.samples.image_rows) + job.spec.execution.backbone.pp)
    )


def test_every_alternative_keeps_images_beside_and_says_what_differs() -> None:
    job, samples = mixture(2, pp=2, modality_parity=True)
    own = job.spec.execution
    found = alternatives_of(job)
    for alternative in found:
        made = identify(job.spec.model_copy(update={"execution": alternative.execution}))
        plan = plan_step(made, 0, samples)
        if alternative.execution.identity_routing:
            check_beside(plan)
    lines = [changes(own, a.execution) for a in found]
    assert {"modality_parity": None} in lines
    assert {"identity_routing": None} in lines


def test_asking_for_nothing_is_the_same_as_saying_so() -> None:
    plain, denied = (
        parse_job(job_data(execution=dict.fromkeys(("modality_parity", "identity_routing"), value)))
        for value in (None, False)
    )
    assert plain == denied == parse_job(job_data())
    assert "parity" not in parse_job(job_data()).text


TOWERS = [module("tower", "i", modality="image"), module("tower", "t", modality="text")]
PARITY, IDENTITY = {"modality_parity": True}, {"identity_routing": True}


@pytest.mark.parametrize(
    ("modules", "fields", "says"),
    [
        ([module("backbone")], PARITY, "needs one encoder and no generator"),
        ([module("encoder"), module("backbone"), module("generator")], PARITY, r"generators \['dit'\]"),
        ([module("backbone")], IDENTITY, "needs an encoder"),
        ([module("encoder"), module("backbone"), module("generator")], IDENTITY, r"generators \['dit'\]"),
        ([module("encoder", dp=2), module("backbone", dp=4)], IDENTITY, r"'vit': \(2, 1, 1\).*'llm': \(4, 1, 1\)"),
        ([module("encoder"), module("backbone", tp=2)], IDENTITY, "give these the degrees of module llm"),
        ([module("encoder", balance="even"), module("backbone")], IDENTITY, "leave balance out"),
        ([module("encoder"), module("backbone")], {**IDENTITY, "layout": {"kind": "colocated"}}, "only a pipelined"),
        ([module("encoder"), module("backbone")], {**PARITY, "layout": {"kind": "colocated"}}, "only a pipelined"),
        ([module("encoder"), module("backbone")], {"modality_parity": 1}, "valid boolean"),
        ([module("encoder"), module("backbone")], {"identity_routing": "true"}, "without quotes"),
        (
            [module("encoder"), module("backbone")],
            {**IDENTITY, "transfers": [{"source": "vit", "target": "llm", "row_bytes": 1, "bytes_per_ns": "1"}]},
            "moves nothing",
        ),
    ],
)
def test_what_is_refused(modules: list[Data], fields: Data, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_job(compose_whole(modules, **fields))
