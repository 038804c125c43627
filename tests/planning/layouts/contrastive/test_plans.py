"""Contrastive jobs, planned: batches stay together in every tower, and memory is kept."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders.contrastive import (
    contrastive_job,
    contrastive_samples,
    contrastive_steps,
    contrastive_table,
    tower,
    two_towers,
)
from hypothesis import given, settings
from planning.layouts.contrastive.checks import advised, check_groups

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.identity import Job, JobSpecError
from dataserver.planning.layouts.contrastive import planner
from dataserver.planning.layouts.contrastive.limits import TowerMemoryError
from dataserver.planning.layouts.contrastive.options import ContrastiveSchedule
from dataserver.planning.plan.expectation import item_sizes, item_sums, microbatch_loads
from dataserver.planning.plan.plan import StepPlan, plan_hash
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import baseline_plan, explain, plan_step, timeline
from dataserver.planning.simulation import OperationKind
from dataserver.planning.stream.samples import StepSamples, Task
from dataserver.planning.stream.sizing import shard_table, size_samples


def planned(job: Job, seed: int = 0) -> StepPlan:
    return plan_step(job, 0, contrastive_samples(job, seed))


def check_starts(job: Job, plan: StepPlan) -> None:
    """Views concatenate their items."""
    for module in job.spec.execution.modules:
        sizes = item_sizes(module, plan.samples)
        for rank in range(module.dp):
            view = view_plan(job.spec, plan, module.name, rank, plan.num_microbatches - 1)
            ends = np.cumsum(sizes[view.items])
            assert view.starts.tolist() == [0, *ends[:-1].tolist()]
            assert view.routings == ()


def check_memory(module: ModuleSpec, plan: StepPlan, peak_bytes: np.ndarray, planned_bytes: int) -> None:
    """What the simulated lists hold, and any microbatches that are in flight together, fit."""
    assert module.memory is not None
    assert planned_bytes == module.memory.budget_bytes
    assert peak_bytes.max() <= module.memory.budget_bytes
    units = item_sums(module, plan.arrangement(module.name), item_sizes(module, plan.samples), plan.num_microbatches)
    assert units.max() <= module.memory.units


def check_refusal(job: Job, samples: StepSamples) -> None:
    """The message names a tower that states its memory, and a sample; what it advises beside more memory suffices."""
    names = "|".join(m.name for m in job.spec.execution.modules if m.memory is not None)
    message = rf"of ({names}) in step 1, .*\(dataset laion, shard 0, row \d+\) wait .*raise memory.budget_bytes of \1"
    with pytest.raises(TowerMemoryError, match=message) as caught:
        plan_step(job, 1, samples)
    for changed in advised(job, str(caught.value)):
        check_groups(changed, plan_step(changed, 1, samples))
    baseline_plan(job, 1, samples)


@settings(max_examples=25, deadline=None)
@given(contrastive_steps())
def test_any_job(problem: tuple[Job, StepSamples]) -> None:
    job, samples = problem
    try:
        plan = plan_step(job, 1, samples)
    except TowerMemoryError:
        check_refusal(job, samples)
        return
    check_groups(job, plan)
    check_starts(job, plan)
    simulated = timeline(job.spec, plan)
    for number, module in enumerate(job.spec.execution.modules):
        held = plan.in_flight(module.name)
        assert (np.diff(held) <= 0).all()
        assert held[-1] >= job.spec.execution.layout.microbatches  # type: ignore[union-attr]
        nodes = [n for n, node in enumerate(simulated.nodes) if node.modules == (module.name,)]
        assert len(nodes) == module.dp * module.pp, number
        busy = simulated.timeline.busy_ns[nodes].reshape(module.dp, module.pp)
        assert (busy[:, 0] >= microbatch_loads(module, plan).sum(axis=1) // module.pp - plan.num_microbatches).all()
        if module.memory is not None:
            check_memory(module, plan, simulated.timeline.peak_bytes[nodes], module.memory.budget_bytes)
    summary = explain(job, plan)
    assert summary.bound_ns <= summary.after.makespan_ns
    assert summary.bound_ns <= summary.before.makespan_ns
    assert not plan.candidates or plan.candidates[0].makespan_ns == summary.after.makespan_ns
    if all(m.memory is None for m in job.spec.execution.modules):
        assert summary.after.makespan_ns <= summary.before.makespan_ns
    assert plan_step(job, 1, samples).hash == plan.hash


def test_towers_hold_the_same_samples_of_a_batch_in_other_places() -> None:
    job = contrastive_job(two_towers(), batch=24, groups=2, microbatches=3)
    plan = planned(job)
    image, text = (plan.arrangement(name) for name in ("image", "text"))
    for group in range(2):
        mine = [set(a.item[a.microbatch // 3 == group].tolist()) for a in (image, text)]
        assert mine[0] == mine[1] == set(range(24 * group, 24 * group + 24))
    assert not np.array_equal(image.microbatch[np.argsort(image.item)], text.microbatch[np.argsort(text.item)])


def test_contrastive_samples() -> None:
    """BOS, text cut to seq_len - 2, EOS; an image takes no tokens, and there are no targets of other losses."""
    job = contrastive_job(two_towers())
    table = contrastive_table(job, 16)
    samples = contrastive_samples(job)
    assert set(samples.task.tolist()) == {Task.CONTRASTIVE}
    assert samples.tokens.tolist() == [min(n + 2, 77) for n in table.text_tokens.tolist()] == table.nominal.tolist()
    assert (samples.text_tokens + samples.truncated_tokens).tolist() == table.text_tokens.tolist()
    plan = planned(job)
    assert (plan.text_tokens, plan.target_patches, plan.routings) == (0, 0, ())


def test_distmm_pipe_is_faster_where_batches_follow_each_other() -> None:
    """Three stages wait at every barrier under batch_sync; with one contrastive batch in a step nothing overlaps."""
    job = contrastive_job(two_towers(), batch=24, groups=4, microbatches=4)
    plan = planned(job)
    names = [c.name for c in plan.candidates]
    assert sorted(names) == sorted(
        f"{schedule}, {order}" for schedule in ContrastiveSchedule for order in ("balanced", "canonical order")
    )
    assert names[0] == "distmm_pipe, balanced"
    step, *others = plan.decisions
    assert (step.subject, step.chosen) == ("step", "distmm_pipe")
    assert step.reason.startswith("simulated ")
    assert "batch_sync" in step.reason
    assert [(d.subject, d.chosen) for d in others] == [("image", "lpt"), ("text", "lpt")]
    assert plan.in_flight("image").tolist() == [6, 5, 4]
    assert plan.in_flight("text").tolist() == [4]
    assert [s.drain_every for s in plan.schedules] == [0, 0]
    alone = planned(contrastive_job(two_towers(), batch=24, groups=1, microbatches=4))
    assert alone.decisions[0].chosen == "batch_sync"
    assert alone.decisions[0].reason.endswith("of two equally fast ones, the one that holds less")
    assert alone.in_flight("image").tolist() == [4, 4, 4]
    assert [s.drain_every for s in alone.schedules] == [4, 4]


def test_extra_in_flight_and_the_simulated_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has as many as make it fastest; here also with two and no other number."""
    job = contrastive_job(two_towers(), batch=24, groups=4, microbatches=4, extra_in_flight=2)
    fastest = planned(job)
    monkeypatch.setattr(planner, "EXTRAS", (2,))
    plan = planned(job)
    assert plan.in_flight("image").tolist() == [8, 7, 4]
    names = {c.name for c in fastest.candidates}
    assert {f"distmm_pipe, balanced{more}" for more in ("", ", 1 extra in flight", ", 2 extra in flight")} <= names
    assert fastest.candidates[0].makespan_ns <= plan.candidates[0].makespan_ns
    pipeline = timeline(job.spec, plan).pipeline
    forwards = [[o.kind for o in operations].index(OperationKind.BACKWARD) for operations in pipeline.operations]
    assert forwards == [9, 8, 7, 7]  # behind the gather; the last stages: 4 forwards, the exchange and the interaction


def test_batch_sync_is_kept_where_it_is_asked_for() -> None:
    plan = planned(contrastive_job(two_towers(), batch=24, groups=4, microbatches=4, schedule="batch_sync"))
    assert plan.decisions[0].chosen == "batch_sync"
    assert plan.decisions[0].reason.startswith("as the job asks")
    assert {c.name.split(",")[0] for c in plan.candidates} == {"batch_sync"}
    assert [s.drain_every for s in plan.schedules] == [4, 4]


def test_memory_limits_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for any seven microbatches that follow each other, where ten would be taken."""
    monkeypatch.setattr(planner, "EXTRAS", (4,))
    shape: dict[str, Any] = {"batch": 24, "groups": 4, "microbatches": 4, "extra_in_flight": 4}
    job = contrastive_job(two_towers(), **shape)
    free = planned(job)
    units = item_sums(job.spec.execution.modules[0], free.arrangement("image"), free.samples.patches, 16)
    seven = max(int(units[:, m : m + 7].sum(axis=1).max()) for m in range(10))
    plan = planned(contrastive_job(two_towers(memory=seven), **shape))
    assert plan.in_flight("image").tolist() == [7, 6, 4]
    found = next(d for d in plan.decisions if "in flight" in d.chosen)
    assert (found.subject, found.chosen) == ("image", "in flight: 7, 6, 4")
    assert found.reason == f"memory holds {seven:,} patches; 10, 9, 4 without that limit"


def test_what_memory_limits_falls_evenly() -> None:
    """Two of the next batch run ahead on the first of five stages. One fewer on each stage would be slower."""
    towers = two_towers(balance="none")
    towers[0] |= {"dp": 1, "pp": 5}
    shape: dict[str, Any] = {"batch": 24, "groups": 6, "microbatches": 2}
    bare = contrastive_job(towers, **shape)
    free = planned(bare)
    assert free.in_flight("image").tolist() == [6, 5, 4, 3, 2]
    units = item_sums(bare.spec.execution.modules[0], free.arrangement("image"), free.samples.patches, 12)
    four = int(np.convolve(units[0], np.ones(4, np.int64), "valid").max())
    towers[0]["memory"] = {"budget_bytes": four, "unit_bytes": 1}
    job = contrastive_job(towers, **shape)
    plan = planned(job)
    assert plan.in_flight("image").tolist() == [4, 4, 3, 3, 2]
    ablation = replace(
        plan, schedules=(replace(plan.schedules[0], in_flight=np.array([4, 3, 2, 2, 2])), plan.schedules[1])
    )
    assert timeline(job.spec, plan).makespan_ns < timeline(job.spec, ablation).makespan_ns


def test_batch_sync_wins_where_memory_leaves_too_little_to_overlap() -> None:
    """Five microbatches in flight where three stages want six: forwards wait for a backward that is far away."""
    job = contrastive_job(two_towers(), batch=24, groups=4, microbatches=4)
    free = planned(job)
    units = item_sums(job.spec.execution.modules[0], free.arrangement("image"), free.samples.patches, 16)
    five = max(int(units[:, m : m + 5].sum(axis=1).max()) for m in range(12))
    plan = planned(contrastive_job(two_towers(memory=five), batch=24, groups=4, microbatches=4))
    assert [c.name.split(",")[0] for c in plan.candidates] == ["batch_sync"] * 2 + ["distmm_pipe"] * 2
    assert plan.in_flight("image").tolist() == [4, 4, 4]


def test_without_memory_to_overlap_the_plan_says_why_it_does_not() -> None:
    """Memory for the fullest batch of a rank, but not for four microbatches of two batches."""
    job = contrastive_job(two_towers(balance="none"), batch=24, groups=4, microbatches=4)
    free = planned(job)
    units = item_sums(job.spec.execution.modules[0], free.arrangement("image"), free.samples.patches, 16)
    aligned = int(units.reshape(2, 4, 4).sum(axis=2).max())
    across = max(int(units[:, m : m + 4].sum(axis=1).max()) for m in range(13))
    assert aligned < across, "choose another seed"
    plan = planned(contrastive_job(two_towers(memory=aligned, balance="none"), batch=24, groups=4, microbatches=4))
    assert plan.decisions[0].chosen == "batch_sync"
    assert plan.decisions[0].reason.startswith(f"distmm_pipe needs room for {across:,} patches on rank ")
    assert f"its memory holds {aligned:,}" in plan.decisions[0].reason
    with pytest.raises(TowerMemoryError, match=r"batch_sync needs room for .* lower stream.contrastive_batch to \d+$"):
        planned(contrastive_job(two_towers(memory=aligned - 1, balance="none"), batch=24, groups=4, microbatches=4))


def test_balancing_knows_the_memory() -> None:
    """Loads of a tower that pays for pairs of tokens alone say little about its memory."""
    cost = {"linear_ps": 0, "quadratic_fs": 1_000_000}
    towers = [tower("image", "image", dp=2, cost=cost), tower("text", "text")]
    job = contrastive_job(towers, batch=24, groups=1)
    samples = contrastive_samples(job, 3)
    free = plan_step(job, 0, samples)
    most = int(item_sums(job.spec.execution.modules[0], free.arrangement("image"), samples.patches, 1).max())
    least = -(-int(samples.patches.sum()) // 2)
    assert least < most
    towers[0]["memory"] = {"budget_bytes": least + (most - least) // 2, "unit_bytes": 1}
    tight = contrastive_job(towers, batch=24, groups=1)
    plan = plan_step(tight, 0, samples)
    assert plan.candidates[0].name == "batch_sync, balanced"
    check_groups(tight, plan)


def test_padded_towers_sort_their_batches() -> None:
    plain, padded = (
        planned(contrastive_job(two_towers(padded=True, balance=balance), batch=48, groups=2, microbatches=4))
        for balance in ("none", "lpt")
    )
    job = contrastive_job(two_towers(padded=True), batch=48, groups=2, microbatches=4)
    for module in job.spec.execution.modules:
        before, after = (int(microbatch_loads(module, plan).sum()) for plan in (plain, padded))
        assert after < 0.95 * before
    assert [d.chosen for d in padded.decisions[1:]] == ["padded", "padded"]
    check_groups(job, padded)


def test_the_baseline_is_in_canonical_order() -> None:
    job = contrastive_job(two_towers(memory=10_000), batch=24, groups=2, microbatches=3)
    plan = baseline_plan(job, 0, contrastive_samples(job))
    for module in job.spec.execution.modules:
        arrangement = plan.arrangement(module.name)
        in_order = np.lexsort((arrangement.item, arrangement.rank, arrangement.microbatch // 3))
        assert arrangement.item[in_order].tolist() == list(range(48))
    assert plan.decisions[0].chosen == "batch_sync"
    assert len(plan.decisions) == 1


def test_samples_that_are_no_pairs_and_broken_batches_are_refused() -> None:
    job = contrastive_job(two_towers())
    samples = contrastive_samples(job)
    table = contrastive_table(job, 15)
    short = size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)
    with pytest.raises(ValueError, match="15 items do not divide into contrastive batches of 8"):
        plan_step(job, 0, short)
    none = np.zeros(0, np.int32)
    table = shard_table(job.stream, np.arange(16), np.ones(16, np.int64), np.zeros(17, np.int64), none, none)
    with pytest.raises(ValueError, match="not one image for each"):
        plan_step(job, 0, size_samples(job.stream, 0, 0, samples.sample, table))


def test_jobs_that_cannot_be_are_refused() -> None:
    with pytest.raises(JobSpecError, match="contrastive_batch 8 does not divide into dp 3 of image x layout"):
        contrastive_job([tower("image", "image", dp=3), tower("text", "text")])
    with pytest.raises(JobSpecError, match="a contrastive layout has two towers or more"):
        contrastive_job([tower("image", "image")])
    with pytest.raises(JobSpecError, match=r"schedule batch_sync has extra_in_flight 1; .* leave it out"):
        contrastive_job(two_towers(), schedule="batch_sync", extra_in_flight=1)


def test_golden_plan() -> None:
    """If this changes, servers of two releases disagree about running jobs: raise plan_version with it."""
    job = contrastive_job(two_towers(), batch=24, groups=4, microbatches=4)
    number = np.arange(96)
    sides = (16 + number * 37 % 300).astype(np.int32)
    table = shard_table(job.stream, number, 1 + number * 53 % 120, np.arange(97), sides, sides[::-1])
    plan = plan_step(job, 2, size_samples(job.stream, 0, 0, number.astype(np.uint64), table))
    found = plan_hash(6, "0" * 64, plan.step, plan).hex()
    assert found == "1e4af439d636b0ee2c90d861aaab9bd7e865ffad19c94b89621f1310fff82dd4"
