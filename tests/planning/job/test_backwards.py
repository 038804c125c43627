"""Jobs whose modules are frozen or compute activations again: their backwards in costs, programs, times and memory."""

import json
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from builders.contrastive import contrastive_job, contrastive_samples, tower
from builders.grouped import grouped_data
from builders.jobs import job_data, module
from builders.samples import make_samples
from builders.transfers import with_transfers

from dataserver.planning.job.identity import Job, JobSpecError, identify, parse_job
from dataserver.planning.layouts.grouped.sequences import group_costs
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.simulation import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    INTERACTION,
    REDUCE,
    UNSHARD,
)

COST = {"microbatch_ns": 100, "linear_ps": 10_000, "quadratic_fs": 10}
IMAGES_COST = {**COST, "linear_ps": 2_000}
"""Of encoder and generator, so that every module has a part in what a step takes."""
NAMES = ("vit", "llm", "dit")
SUBSETS = [found for size in (1, 2, 3) for found in combinations(NAMES, size)]


def compose(*frozen: str, cost: dict[str, Any] | None = None, kind: str = "pipelined", **fields: Any) -> Job:
    """A job of three modules, some of them frozen; `cost` is that of the frozen ones."""
    modules = [module("encoder"), module("backbone"), module("generator")]
    for part in modules:
        part["memory"] = {"budget_bytes": 1 << 20, "unit_bytes": 1}
        part["cost"] = COST if part["kind"] == "backbone" else IMAGES_COST
        if part["name"] in frozen:
            part |= {"frozen": True, "cost": part["cost"] if cost is None else cost}
    stream = {"global_batch": 8, "seq_len": 512, "generation": {"ratio": "0.5"}, "packing": {"enabled": False}}
    return parse_job(job_data(stream=stream, execution={"modules": modules, "layout": {"kind": kind}, **fields}))


def percents(job: Job) -> list[int]:
    return [m.cost.backward_percent for m in job.spec.execution.modules]


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ((), [200, 200, 200]),
        (("vit",), [0, 200, 200]),
        (("llm",), [200, 100, 200]),
        (("vit", "llm"), [0, 0, 200]),
        (("dit",), [200, 200, 100]),
        (("vit", "dit"), [0, 200, 100]),
        (("llm", "dit"), [200, 100, 100]),
        (NAMES, [0, 0, 0]),
    ],
)
@pytest.mark.parametrize("cost", [None, {"model": "tiny", "device": "h100", "efficiency": "0.5"}])
def test_gradients_pass_through_frozen_modules_to_trained_ones(
    frozen: tuple[str, ...], expected: list[int], cost: dict[str, Any] | None
) -> None:
    job = compose(*frozen, cost=cost)
    assert percents(job) == expected
    assert parse_job(json.loads(job.text)).job_id == job.job_id, "a complete job is complete"


def test_a_second_encoder_that_is_trained_keeps_gradients_passing() -> None:
    modules = [module("encoder", frozen=True, datasets=["laion"]), module("encoder", "other"),
               module("backbone", frozen=True)]  # fmt: skip
    datasets = [{"name": name, "fingerprint": "0" * 64} for name in ("laion", "x")]
    job = parse_job(job_data(stream={"datasets": datasets}, execution={"modules": modules}))
    assert percents(job) == [0, 200, 100]


def test_a_module_that_says_it_is_not_frozen_is_as_without_saying_so() -> None:
    data = job_data(generator=1)
    plain = parse_job(data)
    for part in data["execution"]["modules"]:
        part |= {"frozen": False, "recompute": False}
    assert parse_job(data).job_id == plain.job_id


@pytest.mark.parametrize(
    ("frozen", "cost", "message"),
    [
        (("vit",), {**COST, "backward_percent": 200}, "vit is frozen and nothing before it is trained, .* is 200"),
        (("llm",), {**COST, "backward_percent": 0}, "llm is frozen and hands gradients on to vit, .* is 0"),
        (("dit",), {**COST, "backward_percent": 0}, "dit is frozen and hands gradients on to vit and llm"),
        (
            ("vit",),
            {"model": "vit-h", "device": "h100", "efficiency": "0.5", "frozen": True, "input_gradient": True},
            "frozen and input_gradient of the cost: frozen and recompute of the module say what its backward does",
        ),
    ],
)
def test_contradictions_are_refused(frozen: tuple[str, ...], cost: dict[str, Any], message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        compose(*frozen, cost=cost)


@pytest.mark.parametrize("cost", [COST, {"model": "tiny", "device": "h100", "efficiency": "0.5"}])
def test_computing_again_takes_another_forward(cost: dict[str, Any]) -> None:
    modules = [module("encoder", recompute=True, cost=cost), module("backbone", frozen=True, recompute=True, cost=cost),
               module("generator", recompute=True, cost={**COST, "backward_percent": 250})]  # fmt: skip
    stream = {"generation": {"ratio": "0.5"}}
    job = parse_job(job_data(stream=stream, execution={"modules": modules}))
    assert percents(job) == [300, 200, 250]
    assert parse_job(json.loads(job.text)).job_id == job.job_id
    samples = make_samples(job, 1, 1, 2)
    pipeline = timeline(job.spec, plan_step(job, 0, samples)).pipeline
    assert np.array_equal(pipeline.backward_ns[0], pipeline.forward_ns[0] * 3)


@pytest.mark.parametrize("name", ["grouped", "contrastive"])
def test_all_layouts_compute_again(name: str) -> None:
    memory = {"budget_bytes": 9999, "unit_bytes": 1}
    if name == "grouped":
        modules = [module("backbone", recompute=True, memory=memory)]
        stream: dict[str, Any] = {}
        layout: dict[str, Any] = {"kind": name, "max_degree": 1}
    else:
        modules = [{"name": m, "kind": "tower", "modality": m, "recompute": True} for m in ("image", "text")]
        stream = {"global_batch": 8, "contrastive_batch": 4, "packing": {"enabled": False}}
        layout = {"kind": name}
    job = parse_job(job_data(stream=stream, execution={"modules": modules, "layout": layout}))
    assert set(percents(job)) == {300}


def test_there_must_be_a_backward_to_compute_again_in() -> None:
    modules = [module("encoder", frozen=True, recompute=True), module("backbone")]
    with pytest.raises(JobSpecError, match=r"vit is frozen .* no backward that could compute anything again"):
        parse_job(job_data(execution={"modules": modules}))
    cost = {"model": "vit-h", "device": "h100", "efficiency": "0.5", "checkpoint": True}
    with pytest.raises(JobSpecError, match="checkpoint of the cost: frozen and recompute of the module say"):
        parse_job(job_data(execution={"modules": [module("encoder", recompute=True, cost=cost), module("backbone")]}))


def test_groups_exchange_half_as_much_where_the_backbone_runs_no_backward() -> None:
    cost = {"linear_ps": 50, "quadratic_fs": 0, "backward_percent": 200}
    trained = parse_job(grouped_data(2, 600, {"max_degree": 2}, cost, encoder=1))
    exchanged = 2 * 400_000  # `grouped_data`
    assert group_costs(trained.spec.execution).token_ps == (150, 150 + exchanged)
    assert group_costs(trained.spec.forward_only.execution).token_ps == (50, 50 + exchanged // 2)


@pytest.mark.parametrize("schedule", ["batch_sync", "distmm_pipe"])
@pytest.mark.parametrize("frozen", ["image", "text"])
def test_a_frozen_tower_beside_a_trained_one_runs_forwards_and_interactions_alone(frozen: str, schedule: str) -> None:
    towers = [tower(name, name, pp=2, cost=COST, frozen=name == frozen) for name in ("image", "text")]
    job = contrastive_job(towers, batch=4, microbatches=2, interaction_ns=5, schedule=schedule)
    transfer = {"source": frozen, "target": frozen, "latency_ns": 10**6, "bytes_per_ns": "1", "row_bytes": 1}
    job = with_transfers(json.loads(job.text), transfer)
    samples = contrastive_samples(job)
    plan = plan_step(job, 0, samples)
    simulated = timeline(job.spec, plan)
    for program in layout_of(job.spec.execution).programs(job.spec.execution, plan.schedules, plan.num_microbatches):
        kinds = program.operations.kind.tolist()
        assert kinds.count(BACKWARD) == (0 if program.modules == (frozen,) else plan.num_microbatches)
        assert kinds.count(INTERACTION) == kinds.count(EXCHANGE) == (2 if program.stage == 1 else 0)
        assert (kinds.count(UNSHARD), kinds.count(REDUCE)) == (1, program.modules != (frozen,))
    assert layout_of(job.spec.execution).lower_bound_ns(job, plan) <= simulated.makespan_ns
    whole = identify(job.spec.forward_only)
    assert timeline(whole.spec, plan_step(whole, 0, samples)).makespan_ns < simulated.makespan_ns


@pytest.mark.parametrize("schedule", ["batch_sync", "distmm_pipe"])
def test_towers_that_are_all_frozen_run_forwards_and_interactions_alone(schedule: str) -> None:
    towers = [tower(name, name, pp=2, cost=COST) for name in ("image", "text")]
    trained = contrastive_job(towers, batch=4, microbatches=2, interaction_ns=5, schedule=schedule)
    job = identify(trained.spec.forward_only)
    assert parse_job(json.loads(job.text)).job_id == job.job_id
    samples = contrastive_samples(job)
    plan = plan_step(job, 0, samples)
    for program in layout_of(job.spec.execution).programs(job.spec.execution, plan.schedules, plan.num_microbatches):
        expected = [FORWARD, FORWARD, *([EXCHANGE, INTERACTION] if program.stage == 1 else [])] * 2
        assert program.operations.kind.tolist() == [UNSHARD, *expected]
    simulated = timeline(job.spec, plan)
    assert simulated.makespan_ns < timeline(trained.spec, plan_step(trained, 0, samples)).makespan_ns
    assert layout_of(job.spec.execution).lower_bound_ns(job, plan) <= simulated.makespan_ns


@pytest.mark.parametrize("kind", ["pipelined", "colocated"])
@pytest.mark.parametrize("frozen", SUBSETS, ids=" and ".join)
def test_plans_lose_the_backwards_and_the_time_that_nobody_needs(frozen: tuple[str, ...], kind: str) -> None:
    trained, job = compose(kind=kind), compose(*frozen, kind=kind)
    samples = make_samples(job, 8, 1, 2)
    plan = plan_step(job, 0, samples)
    simulated = timeline(job.spec, plan)
    for program in layout_of(job.spec.execution).programs(job.spec.execution, plan.schedules, plan.num_microbatches):
        chunks = program.operations.chunk[program.operations.kind == BACKWARD]
        without = {job.spec.execution.module(name).runs_backward for name in program.modules}
        backward = {job.spec.execution.module(program.modules[chunk]).runs_backward for chunk in chunks.tolist()}
        assert backward == without & {True}
    whole = timeline(trained.spec, plan_step(trained, 0, samples))
    assert simulated.timeline.busy_ns.sum() < whole.timeline.busy_ns.sum()
    assert simulated.makespan_ns + (kind == "colocated" or "llm" in frozen) <= whole.makespan_ns
    assert layout_of(job.spec.execution).lower_bound_ns(job, plan) <= simulated.makespan_ns
    peaks, held = simulated.timeline.peak_bytes, simulated.pipeline.activation_bytes
    assert held is not None
    for node, name in enumerate(m.name for m in job.spec.execution.by_depth if kind == "pipelined"):
        if not job.spec.execution.module(name).runs_backward:
            assert peaks[node] == held[node].max()
            assert plan.in_flight(name).tolist() == [1]
            said = [d.reason for d in plan.decisions if d.subject == name]
            assert said == ["it is frozen and runs no backward"]


def test_a_frozen_encoder_never_waits_for_gradients() -> None:
    job = compose("vit", layout={"kind": "pipelined"})
    simulated = timeline(job.spec, plan_step(job, 0, make_samples(job, 8, 1, 2)))
    first = [i for i, node in enumerate(simulated.nodes) if node.modules == ("vit",)]
    ends, starts = simulated.timeline.end_ns[first], simulated.timeline.start_ns[first]
    listed = starts >= 0
    assert np.array_equal(starts[:, 1:][listed[:, 1:]], ends[:, :-1][listed[:, 1:]])
