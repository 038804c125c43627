"""The baseline uses every rank evenly by count, and what is gained over it has names."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from builders.colocated import colocated_steps
from builders.contrastive import contrastive_steps
from builders.grouped import grouped_data
from builders.jobs import job_data, make_job
from builders.layouts import STEPS
from builders.pipelined import SCHEDULES, with_memory
from builders.samples import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning import I64
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job, identify, parse_job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.layouts.shared.ablation import cumulative_ablation
from dataserver.planning.plan.plan import ArrangedStep
from dataserver.planning.planner import ablation, baseline_plan, explain, plan_step
from dataserver.planning.stream.samples import StepSamples

Step = tuple[Job, StepSamples]


def counts(module: ModuleSpec, plan: ArrangedStep) -> I64:
    """Items of each rank in each wave; of a backbone sequences. int64 [dp, waves]."""
    found = plan.arrangement(module.name)
    items = np.stack([found.rank, found.microbatch, found.slot])
    if module.kind is ModuleKind.BACKBONE:
        items = np.unique(items, axis=1)
    table = np.zeros((module.dp, plan.num_microbatches), np.int64)
    np.add.at(table, (items[0], items[1]), 1)
    return table


def assert_even(table: I64) -> None:
    """No two ranks differ by more than one item, in a wave and in all waves together."""
    assert int((table.max(axis=0) - table.min(axis=0)).max()) <= 1
    total = table.sum(axis=1)
    assert total.max() - total.min() <= 1


@st.composite
def uneven_steps(draw: st.DrawFn, grouped: bool) -> Step:
    """Encoders and generators with fewer, as many or more ranks than the backbone, which need not divide."""
    outer = {name: draw(st.integers(1, 12)) for name in ("encoder", "generator")}
    packed = draw(st.booleans())
    stream = {
        "seq_len": 900,
        "sizing": {"max_patches": 256},
        "packing": {"enabled": packed},
        "generation": {"ratio": draw(st.sampled_from(["0.1", "0.5", "1"]))},
    }
    if grouped:
        most = draw(st.sampled_from([1, 2, 4, 8]))
        stream["global_batch"] = draw(st.integers(1, 40))
        job = parse_job(
            grouped_data(most * draw(st.integers(1, 3)), 1200, {"max_degree": most}, stream=stream, **outer)
        )
    else:
        dp, microbatch = draw(st.integers(1, 8)), draw(st.integers(1, 3))
        stream["global_batch"] = dp * microbatch * draw(st.integers(1, 4))
        layout = {"kind": "pipelined", "schedule": draw(st.sampled_from(SCHEDULES[:2]))}
        execution = {"microbatch": microbatch, "layout": layout}
        job = make_job(stream=stream, execution=execution, backbone=(dp, draw(st.integers(1, 3))), **outer)
    most_samples = (3 if packed else 1) * job.stream.global_batch
    return job, make_samples(
        job, draw(st.integers(0, most_samples)), draw(st.integers(0, 2**32)), draw(st.integers(0, 3))
    )


@settings(max_examples=60, deadline=None)
@given(uneven_steps(grouped=False))
def test_the_baseline_of_a_pipeline_leaves_no_rank_idle_beside_a_busy_one(step: Step) -> None:
    job, samples = step
    plan = baseline_plan(job, 0, samples)
    for module in job.spec.execution.modules:
        assert_even(counts(module, plan))


@settings(max_examples=40, deadline=None)
@given(uneven_steps(grouped=True))
def test_the_baseline_of_groups_leaves_no_rank_idle_beside_a_busy_one(step: Step) -> None:
    """Images as above; sequences share groups of the largest degree, which hold tokens and not counts."""
    job, samples = step
    plan = baseline_plan(job, 0, samples)
    for module in job.spec.execution.modules:
        if module.handles_images:
            assert_even(counts(module, plan))


@settings(max_examples=40, deadline=None)
@given(colocated_steps())
def test_the_baseline_of_colocated_modules_gives_ranks_equal_counts_of_sequences(step: Step) -> None:
    """Images stay with them, as in any data-parallel trainer; the change after it deals them out evenly.

    Where that is slower than the baseline, `plan_step` plans as that does; its layout alone does what it is told.
    """
    job, samples = step
    layout = layout_of(job.spec.execution)
    backbone = job.spec.execution.backbone
    total = counts(backbone, baseline_plan(job, 0, samples)).sum(axis=1)
    assert total.max() - total.min() <= 1
    evenly = [s.execution for s in layout.ablation(job) if s.name == "images dealt out evenly"]
    assert len(evenly) == any(m.handles_images and not m.balance.keeps_order for m in job.spec.execution.modules)
    for execution in evenly:
        plan = layout.plan(running(job, execution), 0, samples)
        for module in execution.modules:
            if module.balance.value == "even" and not module.padded:
                total = counts(module, plan).sum(axis=1)
                assert total.max() - total.min() <= 1


@settings(max_examples=30, deadline=None)
@given(contrastive_steps())
def test_the_baseline_of_towers_gives_ranks_and_microbatches_equal_counts(step: Step) -> None:
    job, samples = step
    plan = baseline_plan(job, 0, samples)
    for module in job.spec.execution.modules:
        table = counts(module, plan)
        assert (table == len(samples) // table.size).all()


@pytest.mark.parametrize(("encoder", "backbone"), [(12, 4), (8, 2), (4, 12)])
def test_every_encoder_rank_works_in_the_baseline(encoder: int, backbone: int) -> None:
    """Twelve ranks beside four had eight idle ones: whatever was planned looked three times as good."""
    stream = {"global_batch": 48, "seq_len": 900, "packing": {"enabled": False}}
    job = make_job(stream=stream, encoder=encoder, backbone=(backbone, 1))
    samples = make_samples(job, 48, 1, 4)
    assert np.count_nonzero(explain(job, plan_step(job, 0, samples)).loads_before["vit"]) == encoder


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(STEPS)).flatmap(STEPS.__getitem__))
def test_an_ablation_leads_from_the_baseline_to_the_job(step: Step) -> None:
    job, _ = step
    found = layout_of(job.spec.execution).ablation(job)
    assert found[-1].execution == job.spec.execution
    assert len({s.name for s in found}) == len(found)
    assert all(a.execution != b.execution for a, b in pairwise(found))
    assert all(m.memory is None for m in found[0].execution.modules if m.kind is not ModuleKind.BACKBONE)
    for entry in found:  # each is a job that servers accept
        assert parse_job(running(job, entry.execution).spec.model_dump(mode="json")).spec.execution == entry.execution


def test_the_names_of_an_ablation() -> None:
    job = make_job(stream={"generation": {"ratio": "0.5"}}, encoder=2, backbone=(2, 2), generator=2)
    names = [s.name for s in layout_of(job.spec.execution).ablation(job)]
    spread = ["images spread over ranks", "sequences spread over ranks"]
    assert names == ["best fit, canonical order", "balanced packing", *spread, "order searched"]
    tight = with_memory(job, {"vit": 4_000, "llm": 4_000, "dit": 4_000})
    names = [s.name for s in layout_of(tight.spec.execution).ablation(tight)]
    assert names[-3:] == ["within memory", "order searched", "up to 4 more in flight"]
    data = job_data(encoder=2, backbone=(2, 1), balance="none", stream={"packing": {"enabled": False}})
    beside = parse_job(data)
    names = [s.name for s in layout_of(beside.spec.execution).ablation(beside)]
    assert names == ["canonical order", "images beside their sequences", "order searched"]
    grouped = parse_job(grouped_data(4, 1200, {"max_degree": 4}, encoder=2))
    names = [s.name for s in layout_of(grouped.spec.execution).ablation(grouped)]
    groups = ["the best degree of each step", "unequal groups"]
    assert names == ["best fit, groups of the largest degree", "balanced packing", *groups, spread[0], "order searched"]


def test_the_ends_of_an_ablation_are_what_the_plan_is_compared_with() -> None:
    job = make_job(stream={"global_batch": 16, "seq_len": 900}, encoder=3, backbone=(2, 2))
    plan = plan_step(job, 0, make_samples(job, 40, 1, 3))
    found, summary = ablation(job, plan), explain(job, plan)
    assert found[0].makespan_ns == summary.before.makespan_ns
    assert found[-1].makespan_ns == summary.after.makespan_ns < summary.before.makespan_ns


def running(job: Job, execution: Execution) -> Job:
    return identify(job.spec.model_copy(update={"execution": execution}))


def test_a_step_that_an_ablation_cannot_plan_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where canonical order exceeds a memory."""
    job = make_job(stream={"global_batch": 16, "seq_len": 900}, encoder=3, backbone=(2, 2))
    plan = plan_step(job, 0, make_samples(job, 40, 1, 3))
    whole = ablation(job, plan)
    assert len(whole) > 2
    assert all(entry.makespan_ns is not None for entry in whole)

    def refuse(*_: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr("dataserver.planning.planner.plan_step", refuse)
    found = ablation(job, plan)
    assert [entry.name for entry in found] == [entry.name for entry in whole]
    assert [entry.makespan_ns for entry in found] == [*[None] * (len(found) - 1), whole[-1].makespan_ns]


def test_an_ablation_that_does_not_end_at_its_job_is_refused() -> None:
    job = make_job(encoder=3, backbone=(2, 2))
    baseline = layout_of(job.spec.execution).ablation(job)[0].execution
    assert baseline != job.spec.execution
    with pytest.raises(ValueError, match="the ablation of a pipelined layout does not end at its job"):
        cumulative_ablation(job, "canonical order", baseline, [("nothing", lambda execution: execution)])


def test_a_folder_whose_layout_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataserver.planning.layouts.interface.import_module", lambda _: SimpleNamespace(LAYOUT=7))
    with pytest.raises(TypeError, match=r"dataserver\.planning\..*\.layout\.LAYOUT is a int; a Layout is required"):
        layout_of(make_job(encoder=3, backbone=(2, 2)).spec.execution)
