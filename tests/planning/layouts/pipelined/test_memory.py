"""Memory of pipelined jobs: every microbatch fits, stages hold no more than they can, and errors name the sample."""

import re

import numpy as np
import pytest
from builders.jobs import make_job
from builders.pipelined import Step, equal_job, largest, plan_or_message, tight_steps, with_memory
from builders.samples import make_samples
from hypothesis import given, settings

from dataserver.planning.job.fields import ModuleKind, Schedule
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.expectation import held_units
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import baseline_plan, plan_step, timeline
from dataserver.planning.simulation import Pipeline, chain_edges, simulate, stage_operations
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import SampleTooLargeError


def can_be_refused(job: Job) -> bool:
    """Whether a sample whose images fit one rank may still be too large: these are padded to the largest of them."""
    return any(m.padded for m in job.spec.execution.modules if m.kind is not ModuleKind.BACKBONE)


@settings(max_examples=80, deadline=None)
@given(tight_steps())
def test_plans_keep_within_memory_or_name_a_sample(step: Step) -> None:
    job, samples = step
    plan = plan_or_message(job, samples)
    if isinstance(plan, str):
        assert can_be_refused(job)
        assert re.match(r"dataset \w+, shard 0, row \d+: the sample has \d+ (tokens|patches)", plan)
        return
    simulated = timeline(job.spec, plan)
    for node, peak in zip(simulated.nodes, simulated.timeline.peak_bytes.tolist(), strict=True):
        memory = job.spec.execution.module(node.modules[0]).memory
        assert memory is None or peak <= memory.budget_bytes
    check_whole(job, plan, samples)


def check_whole(job: Job, plan: StepPlan, samples: StepSamples) -> None:
    """Nothing is lost, counts are equal, microbatches fit, no stage holds more than the one before it."""
    assert sorted(plan.arrangement("llm").item.tolist()) == list(range(len(samples)))
    modules = sorted(job.spec.execution.modules, key=lambda m: list(ModuleKind).index(m.kind))
    images = [i for m in modules if m.name != "llm" for i in plan.arrangement(m.name).item.tolist()]
    assert sorted(images) == list(range(len(samples.image_rows)))
    for module in modules:
        found = plan.arrangement(module.name)
        assert found.microbatch.max(initial=0) < plan.num_microbatches
        assert module.memory is None or held_units(module, plan).max(initial=0) <= module.memory.units
        assert plan.in_flight(module.name).min() >= 1
        assert (np.diff(plan.in_flight(module.name)) <= 0).all()
    if job.spec.execution.layout.schedule is Schedule.INTERLEAVED:
        assert plan.num_microbatches % job.spec.execution.backbone.pp == 0
        return
    assert all((plan.in_flight(m.name) == 1).all() for m in modules if not m.runs_backward)
    waiting = [m for m in modules if m.runs_backward]
    ends = {kind: [plan.in_flight(m.name) for m in waiting if m.kind is kind] for kind in ModuleKind}
    for backbone in ends[ModuleKind.BACKBONE]:
        assert all(held[-1] >= backbone[0] for held in ends[ModuleKind.ENCODER])
        assert all(held[0] <= backbone[-1] for held in ends[ModuleKind.GENERATOR])


def held(step: Step) -> tuple[list[int], list[int]]:
    plan = plan_step(step[0], 0, step[1])
    return plan.in_flight("vit").tolist(), plan.in_flight("llm").tolist()


def test_stages_hold_what_1f1b_asks_for_as_far_as_memory_goes() -> None:
    assert held(equal_job(12, {})) == ([5], [4, 3, 2, 1])
    assert held(equal_job(12, {}, extra_in_flight=0)) == ([5], [4, 3, 2, 1])
    assert held(equal_job(12, {"llm": 299})) == ([5], [2, 2, 1, 1])
    assert held(equal_job(12, {"llm": 300})) == ([5], [3, 3, 2, 1])
    assert held(equal_job(12, {"vit": 64 * 3})) == ([3], [3, 2, 2, 1])
    assert held(equal_job(12, {"vit": 64})) == ([1], [1, 1, 1, 1])
    assert held(equal_job(12, {"llm": 100})) == ([5], [1, 1, 1, 1])


def test_what_memory_limits_falls_evenly() -> None:
    """Neighbours that hold equally many take turns; of several such pairs in a row all do."""
    even, clamped = np.array([5, 5, 4, 4, 3, 2, 2, 1]), np.array([5, 5, 5, 5, 4, 3, 2, 1])
    forward = np.full((8, 32), 1)
    times = []
    for vector in (even, clamped):
        lists = [stage_operations(n, 32) for n in vector.tolist()]
        pipeline = Pipeline(8, np.arange(8), forward, 2 * forward, chain_edges(8, 32), lists)
        times.append(simulate(pipeline).makespan_ns)
    assert times == [3 * 69, 3 * 120]
    assert held(equal_job(32, {"llm": 500}, stages=8)) == ([9], even.tolist())


def test_gpipe_holds_all_microbatches_as_far_as_memory_goes() -> None:
    assert held(equal_job(6, {}, schedule="gpipe")) == ([6], [6] * 4)
    assert held(equal_job(6, {"llm": 450}, schedule="gpipe")) == ([6], [4, 3, 2, 1])


def test_interleaved_stages_hold_passes() -> None:
    # Twice the stages behind, one chunk of all stages, and one more; 8 passes are all that there are.
    assert held(equal_job(8, {}, schedule="interleaved", chunks=2))[1] == [11, 9, 7, 5]
    assert held(equal_job(4, {}, schedule="interleaved", chunks=2))[1] == [8, 8, 7, 5]
    # A pass holds half a microbatch: 50 tokens.
    assert held(equal_job(8, {"llm": 400}, schedule="interleaved", chunks=2))[1] == [8, 8, 7, 5]
    assert held(equal_job(8, {"llm": 250}, schedule="interleaved", chunks=2))[1] == [5, 5, 5, 5]


def test_interleaved_samples_keep_apart_where_memory_holds_few_of_them() -> None:
    """No list needs fewer passes in flight than 5, so waves without samples stand between those with one."""
    for chunks in (2, 3):
        for memory in ({"llm": 100}, {"vit": 64}, {"llm": 100, "vit": 64}):
            job, samples = equal_job(8, memory, schedule="interleaved", chunks=chunks)
            plan = plan_step(job, 0, samples)
            check_whole(job, plan, samples)
            waves = np.sort(plan.arrangement("llm").microbatch)
            assert np.diff(waves).min() > 1
            assert plan.num_microbatches <= 2 * 4 * 8
            simulated = timeline(job.spec, plan).timeline
            assert simulated.peak_bytes.max() == (300 if "llm" in memory else 192)


def test_decisions_say_what_limits_a_stage() -> None:
    job, samples = equal_job(12, {"llm": 299})
    decisions = {d.subject: d for d in plan_step(job, 0, samples).decisions if d.subject != "step"}
    assert decisions["llm"].chosen == "in flight: 2, 2, 1, 1"
    assert decisions["llm"].reason == (
        "1f1b asks for 4, 3, 2, 1; memory for 299 tokens holds 2; the number falls evenly towards the last stage, so "
        "that few neighbours wait for each other"
    )
    assert decisions["vit"].reason == "1f1b asks for 5"


def test_extra_microbatches_are_taken_where_they_help() -> None:
    for seed in range(4):
        makespans = {}
        for extra in (0, 2):
            layout = {"kind": "pipelined", "extra_in_flight": extra}
            job = make_job(
                stream={"global_batch": 48, "seq_len": 2048, "packing": {"enabled": False}},
                execution={"layout": layout},
                backbone=(2, 4),
            )
            plan = plan_step(job, 0, make_samples(job, 48, seed, 3))
            makespans[extra] = timeline(job.spec, plan).makespan_ns
            assert plan.candidates[0].makespan_ns == makespans[extra]
        assert makespans[2] <= makespans[0]
        assert any("0 extra in flight" in c.name for c in plan.candidates)
        assert any(d.chosen.endswith("extra in flight") and d.subject == "step" for d in plan.decisions)


def test_extra_microbatches_are_automatic_where_all_memory_is_known() -> None:
    job, samples = equal_job(24, {"vit": 64 * 100, "llm": 100 * 100})
    assert any("4 extra in flight" in c.name for c in plan_step(job, 0, samples).candidates)
    job, samples = equal_job(24, {"vit": 64 * 100})
    assert not any("extra" in c.name for c in plan_step(job, 0, samples).candidates)


def test_microbatches_become_more_until_they_fit() -> None:
    def plan_with(units: dict[str, int]) -> StepPlan:
        job = make_job(
            stream={"global_batch": 16, "seq_len": 512, "packing": {"enabled": False}},
            execution={"microbatch": 4, "layout": {"kind": "pipelined", "fewest_microbatches": True}},
            encoder=2,
            backbone=(2, 2),
        )
        samples = make_samples(job, 16, 3, 1)
        most = largest(job, samples)
        return plan_step(with_memory(job, {name: most[name] * n for name, n in units.items()}), 0, samples)

    assert plan_with({}).num_microbatches == 2
    assert plan_with({"llm": 100}).num_microbatches == 2
    assert plan_with({"llm": 1}).num_microbatches > 2
    # One sample in the encoder at once, on two ranks: waves of at most two images.
    assert plan_with({"vit": 1}).num_microbatches > 2
    chosen = [d.chosen for d in plan_with({"llm": 1}).decisions]
    assert any(re.fullmatch(r"\d+ microbatches of each rank", text) for text in chosen)


def test_a_sample_that_no_microbatch_holds_is_named() -> None:
    job, samples = equal_job(4, {"llm": 99})
    row = int(samples.sample[0])
    with pytest.raises(SampleTooLargeError, match=rf"^dataset laion, shard 0, row {row}: .*100 tokens.* holds 99 "):
        plan_step(job, 0, samples)
    job, samples = equal_job(4, {"vit": 63})
    with pytest.raises(
        SampleTooLargeError, match=rf"^dataset laion, shard 0, row {row}: .*64 patches.*63 on each of its ranks"
    ):
        plan_step(job, 0, samples)


def test_smaller_microbatches_fill_a_pipeline_that_memory_would_empty() -> None:
    """Memory for two microbatches of four sequences: smaller ones keep all stages busy, and the search keeps to it."""
    for seed in range(3):
        job = make_job(
            stream={"global_batch": 64, "seq_len": 512, "packing": {"enabled": False}},
            execution={"microbatch": 4, "layout": {"kind": "pipelined", "fewest_microbatches": True}},
            encoder=2,
            backbone=(2, 4),
        )
        samples = make_samples(job, 64, seed, 1)
        most = largest(job, samples)
        tight = with_memory(job, {name: 6 * size for name, size in most.items()})
        plan = plan_step(tight, 0, samples)
        assert plan.num_microbatches > 8
        before = baseline_plan(tight, 0, samples)
        assert timeline(tight.spec, plan).makespan_ns <= timeline(tight.spec, before).makespan_ns
        names = [c.name for c in plan.candidates]
        assert len(names) == len(set(names))
        assert any(d.chosen == f"{plan.num_microbatches} microbatches of each rank" for d in plan.decisions)
