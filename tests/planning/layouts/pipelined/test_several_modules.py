"""Laws of plans whose modules differ: several encoders and generators, policies, padding and memory of each."""

from collections import Counter
from typing import Any

import numpy as np
from builders.jobs import TWO_DATASETS, make_job
from builders.pipelined import steps, tight_jobs
from builders.samples import mixed_samples
from hypothesis import assume, given, settings

from dataserver.planning import I64
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.expectation import microbatch_loads
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import baseline_plan, explain, plan_step, timeline
from dataserver.planning.stream.samples import ShardTable, StepSamples, Task
from dataserver.planning.stream.sizing import SampleTooLargeError, concatenate, size_samples

SCHEDULES = ("1f1b", "gpipe", "interleaved")
Step = tuple[Job, StepSamples]


def others(job: Job) -> list[ModuleSpec]:
    """Encoders and generators."""
    return [m for m in job.spec.execution.modules if m.kind is not ModuleKind.BACKBONE]


def sizes_of(plan: StepPlan, module: ModuleSpec) -> I64:
    return plan.samples.tokens if module.kind is ModuleKind.BACKBONE else plan.samples.patches


@settings(max_examples=70)
@given(steps(several=True, schedules=SCHEDULES))
def test_any_step(step: Step) -> None:
    job, samples = step
    plan, baseline = plan_step(job, 3, samples), baseline_plan(job, 3, samples)
    places_every_sample_and_image_once(job, baseline)
    places_every_sample_and_image_once(job, plan)
    keeps_memory(job, plan)
    fills_the_rows_of_the_backbone_wave_by_wave(job, plan)
    is_the_same_every_time_and_judged_as_simulated(job, plan)
    assert plan.samples is baseline.samples is samples


def places_every_sample_and_image_once(job: Job, plan: StepPlan) -> None:
    """By its module."""
    samples = plan.samples
    assert sorted(plan.arrangement("llm").item.tolist()) == list(range(len(samples)))
    placed = {m.name: plan.arrangement(m.name).item.tolist() for m in others(job)}
    images = Counter(i for items in placed.values() for i in items)
    assert images == Counter(range(len(samples.image_rows)))
    for module in others(job):
        task = Task.UNDERSTANDING if module.kind is ModuleKind.ENCODER else Task.GENERATION
        handled = {job.stream.datasets[d].name for d in samples.dataset[samples.image_sample[placed[module.name]]]}
        named = {n for m in others(job) if m.kind is module.kind for n in m.datasets or ()}
        assert handled <= (set(module.datasets) if module.datasets else {"laion", "x"} - named)
        assert set(samples.task[samples.image_sample[placed[module.name]]].tolist()) <= {task}


def keeps_memory(job: Job, plan: StepPlan) -> None:
    for module in job.spec.execution.modules:
        found = plan.arrangement(module.name)
        assert ((found.rank >= 0) & (found.rank < module.dp)).all()
        assert ((found.microbatch >= 0) & (found.microbatch < plan.num_microbatches)).all()
        if module.memory is None:
            continue
        sizes, held = sizes_of(plan, module)[found.item], plan.in_flight(module.name)
        assert (held >= 1).all()
        for rank in range(module.dp):
            for microbatch in range(plan.num_microbatches):
                here = sizes[(found.rank == rank) & (found.microbatch == microbatch)]
                units = len(here) * here.max(initial=0) if module.padded else here.sum()
                assert units <= module.memory.units


@settings(max_examples=80)
@given(tight_jobs())
def test_what_is_accepted_when_a_job_is_created_can_be_planned(case: tuple[Job, list[ShardTable]]) -> None:
    """Memory that holds every sample alone makes microbatches more, and never fails at some later step (law 6)."""
    job, tables = case
    limits = layout_of(job.spec.execution).limits(job.spec)
    try:
        for number, table in enumerate(tables):
            limits.add(number, table, "shard")
    except SampleTooLargeError:
        assume(False)
    numbered = enumerate(tables)
    samples = concatenate([size_samples(job.stream, n, 0, t.row.astype(np.uint64), t) for n, t in numbered])
    plan = plan_step(job, 0, samples)
    keeps_memory(job, plan)


def fills_the_rows_of_the_backbone_wave_by_wave(job: Job, plan: StepPlan) -> None:
    """Each row of each backbone microbatch has one source or target, and it stands in the same wave."""
    for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR):
        filled: list[tuple[int, int, int]] = []
        for routing in plan.routings:
            into = routing.target_module == "llm"
            if into is not (kind is ModuleKind.ENCODER):
                continue
            assert np.array_equal(routing.source_microbatch, routing.target_microbatch)
            side = "target" if into else "source"
            ranks, starts = getattr(routing, f"{side}_rank"), getattr(routing, f"{side}_start")
            for rank, wave, start, rows in zip(
                *(a.tolist() for a in (ranks, routing.source_microbatch, starts, routing.rows)), strict=True
            ):
                filled += [(rank, wave, start + row) for row in range(rows)]
        assert sorted(filled) == sorted(expected_rows(job, plan, kind))


def expected_rows(job: Job, plan: StepPlan, kind: ModuleKind) -> list[tuple[int, int, int]]:
    """(rank, wave, row) of every slot that the backbone's views have."""
    task = Task.UNDERSTANDING if kind is ModuleKind.ENCODER else Task.GENERATION
    found: list[tuple[int, int, int]] = []
    llm, samples = job.spec.execution.backbone, plan.samples
    for rank in range(llm.dp):
        for wave in range(plan.num_microbatches):
            items = view_plan(job.spec, plan, "llm", rank, wave).items
            images = [
                i
                for item in items.tolist()
                if samples.task[item] == task
                for i in range(*samples.image_offsets[item : item + 2].tolist())
            ]
            rows = sum(
                int(samples.patches[i]) // 4 if kind is ModuleKind.ENCODER else job.stream.generation.query_tokens
                for i in images
            )
            found += [(rank, wave, row) for row in range(rows)]
    return found


def is_the_same_every_time_and_judged_as_simulated(job: Job, plan: StepPlan) -> None:
    again = plan_step(job, 3, plan.samples)
    assert (plan.hash, plan.candidates, plan.decisions) == (again.hash, again.candidates, again.decisions)
    simulated = timeline(job.spec, plan).makespan_ns
    if plan.candidates:
        assert plan.candidates[0].makespan_ns == simulated == min(c.makespan_ns for c in plan.candidates)
    assert explain(job, plan).bound_ns <= simulated


def job_of(*modules: dict[str, Any], **arguments: Any) -> Job:
    stream = {"datasets": TWO_DATASETS, "global_batch": 8, "sizing": {"max_patches": 256}, "seq_len": 900}
    return make_job(stream=stream, execution={"modules": list(modules), **arguments})


def test_encoders_are_balanced_each_by_itself() -> None:
    llm = {"name": "llm", "kind": "backbone", "dp": 4}
    job = job_of(
        {"name": "a", "kind": "encoder", "dp": 4, "datasets": ["x"]},
        {"name": "b", "kind": "encoder", "dp": 2},
        llm,
        layout={"kind": "pipelined", "order": "disttrain"},  # a search spares only what makes the step faster
    )
    samples = mixed_samples(job, 300, seed=2)
    plan = plan_step(job, 0, samples)
    for name, dataset in (("a", 1), ("b", 0)):
        module = job.spec.execution.module(name)
        assert set(samples.dataset[samples.image_sample[plan.arrangement(name).item]].tolist()) == {dataset}
        loads = microbatch_loads(module, plan).sum(axis=1)
        assert loads.max() < 1.15 * loads.mean()
