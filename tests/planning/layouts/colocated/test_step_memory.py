"""What colocated modules keep of a whole step, within `memory.step_bytes`."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from builders.jobs import changed, job_data
from builders.samples import make_samples, make_table
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.balancing import BinBudgetError, bin_loads
from dataserver.planning.job import limits as plan_limits
from dataserver.planning.job.fields import PLAN_LIMITS
from dataserver.planning.job.identity import Job, JobSpecError, canonical_json, parse_job
from dataserver.planning.layouts.colocated import rounds
from dataserver.planning.layouts.colocated.rounds import arrange_step
from dataserver.planning.layouts.colocated.splitting import pack_for_rounds
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.layouts.shared.sequences import pack_step
from dataserver.planning.plan.arranging import module_images
from dataserver.planning.plan.expectation import held_units
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import plan_step, timeline
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import SampleTooLargeError, concatenate, shard_table, size_samples

UNIT_BYTES = 10
ENCODER, BACKBONE, GENERATOR = range(3)
QUADRATIC = {"linear_ps": 0, "quadratic_fs": 10**6}
"""A load that says little about memory: one large image costs as much as many small ones."""


def memory(units: int, step_units: int | None = None) -> dict[str, int]:
    step = {} if step_units is None else {"step_bytes": step_units * UNIT_BYTES}
    return {"budget_bytes": units * UNIT_BYTES, "unit_bytes": UNIT_BYTES, **step}


def colocated_data(
    dp: int = 4, *, generator: bool = False, batch: int = 16, max_patches: int = 256, **modules: dict[str, Any]
) -> dict[str, Any]:
    """Fields of modules by name."""
    data = job_data(
        encoder=dp,
        backbone=(dp, 1),
        generator=dp if generator else 0,
        stream={
            "seq_len": 4000,
            "sizing": {"max_patches": max_patches},
            "global_batch": batch,
            "generation": {"ratio": "0.5" if generator else "0", "query_tokens": 16},
        },
        execution={"layout": {"kind": "colocated", "ranks_per_node": 2}},
    )
    for module in data["execution"]["modules"]:
        module |= modules.get(module["name"], {})
    return data


def of_step(job: Job, plan: StepPlan, name: str) -> list[int]:
    """What each rank keeps."""
    return [int(n) for n in held_units(job.spec.execution.module(name), plan).sum(axis=1)]


def test_a_job_without_it_has_the_identity_that_it_had() -> None:
    data = colocated_data(vit={"memory": memory(500)})
    job = parse_job(data)
    assert b"step_bytes" not in canonical_json(job.spec)
    assert job.job_id != parse_job(colocated_data(vit={"memory": memory(500, 5000)})).job_id


MEMORY = ("execution", "modules")
NEVER = "has memory.step_bytes, but it never keeps a whole step; only encoders of a colocated layout do"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(job_data(), (*MEMORY, ENCODER, "memory"), memory(500, 500)), f"module vit {NEVER}"),
        (colocated_data(llm={"memory": memory(1000, 9000)}), f"module llm {NEVER}"),
        (colocated_data(generator=True, dit={"memory": memory(1000, 9000)}), f"module dit {NEVER}"),
        (
            colocated_data(vit={"memory": memory(500, 500), "cost": QUADRATIC | {"backward_percent": 0}}),
            f"module vit {NEVER}",
        ),
        (
            colocated_data(vit={"memory": memory(500, 499)}),
            "step_bytes is 4990 and budget_bytes 5000; a microbatch is part of its step: lower budget_bytes",
        ),
    ],
)
def test_where_it_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(JobSpecError, match=re.escape(message)):
        parse_job(data)


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_that_would_keep_too_much_get_other_images(padded: bool) -> None:
    """Balanced by their time alone, some rank has all the small images; with too little memory for that it has not."""
    vit = {"cost": QUADRATIC, "padded": padded}
    free = parse_job(colocated_data(max_patches=900, vit=vit | {"memory": memory(900)}))
    samples = make_samples(free, 64, 3, 2)
    before = plan_step(free, 0, samples)
    kept = of_step(free, before, "vit")
    limit = max(kept) - 1
    assert 4 * limit > sum(kept)
    job = parse_job(colocated_data(max_patches=900, vit=vit | {"memory": memory(900, limit)}))
    plan = plan_step(job, 0, samples)
    assert max(of_step(job, plan, "vit")) <= limit
    assert plan.num_microbatches == before.num_microbatches
    (decision,) = [d for d in plan.decisions if d.chosen.startswith("keeps")]
    assert decision.subject == "vit"
    assert decision.chosen == f"keeps {max(of_step(job, plan, 'vit')):,} patches of the step on the fullest rank"
    assert f"memory.step_bytes holds {limit:,}" in decision.reason


@st.composite
def bounded_steps(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """With as much memory for the step as any way to spread it evenly takes: the mean and the largest item."""
    dp, generator, padded = draw(st.integers(1, 5)), draw(st.booleans()), draw(st.booleans())
    fields = {"vit": {"cost": QUADRATIC, "padded": padded}}
    batch = dp * draw(st.integers(1, 4))
    data = colocated_data(dp, generator=generator, batch=batch, max_patches=1024, **fields)
    free = parse_job(data)
    samples = make_samples(free, draw(st.integers(1, 80)), draw(st.integers(0, 99)), draw(st.integers(0, 6)))
    images = module_images(free.spec, free.spec.execution.module("vit"), samples)
    patches = int(samples.patches[images].sum())
    vit = memory(1024, (2 if padded else 1) * (-(-patches // dp) + 1024))
    data = changed(data, (*MEMORY, ENCODER, "memory"), vit)
    if generator:
        tokens = int(samples.tokens.sum())
        data = changed(data, (*MEMORY, BACKBONE, "memory"), memory(4000, 2 * tokens // dp + 4000))
    return parse_job(data), samples


@settings(max_examples=80)
@given(bounded_steps())
def test_no_rank_keeps_more_than_it_has_room_for(drawn: tuple[Job, StepSamples]) -> None:
    job, samples = drawn
    plan = plan_step(job, 0, samples)
    for module in job.spec.execution.modules:
        if module.memory is not None and module.memory.step_units is not None:
            assert max(of_step(job, plan, module.name)) <= module.memory.step_units
            assert held_units(module, plan).max() <= module.memory.units
    assert sorted(np.concatenate([a.item for a in plan.arrangements if a.module == "llm"])) == list(range(len(samples)))


def num_rounds(plan: StepPlan) -> int:
    size = plan.schedules[0].drain_every or plan.num_microbatches
    assert plan.num_microbatches % size == 0
    assert {s.drain_every for s in plan.schedules} == {plan.schedules[0].drain_every}
    return plan.num_microbatches // size


def assert_rounds_keep_little(job: Job, plan: StepPlan) -> None:
    """No rank keeps too much of a round, and no row leaves one; the simulated peak is that of a round."""
    rounds = num_rounds(plan)
    for module in job.spec.execution.modules:
        held = held_units(module, plan)
        if module.memory is not None:
            assert held.max() <= module.memory.units
            if module.memory.step_units is not None:
                assert held.reshape(module.dp, rounds, -1).sum(axis=2).max() <= module.memory.step_units
    size = plan.num_microbatches // rounds
    assert all((r.source_microbatch // size == r.target_microbatch // size).all() for r in plan.routings)


@pytest.mark.parametrize("microbatch", [1, 2])
def test_a_step_that_all_ranks_together_cannot_keep_is_cut_into_the_fewest_rounds(microbatch: int) -> None:
    data = colocated_data(vit={"memory": memory(256, 900)})
    data["execution"]["microbatch"] = microbatch
    job, samples = parse_job(data), make_samples(parse_job(data), 64, 3, 2)
    total, together = int(samples.patches.sum()), 4 * 900
    plan = plan_step(job, 0, samples)
    assert num_rounds(plan) == -(-total // together) > 2
    assert_rounds_keep_little(job, plan)
    decision = next(d for d in plan.decisions if "rounds" in d.chosen)
    assert decision.chosen == f"{num_rounds(plan)} rounds, one after the other"
    assert decision.reason.startswith("in fewer, vit would keep more than memory.step_bytes holds")
    assert max(plan.in_flight("vit")) * num_rounds(plan) == plan.num_microbatches
    free = parse_job(changed(data, (*MEMORY, ENCODER, "memory"), memory(256, total)))
    whole = plan_step(free, 0, samples)
    assert num_rounds(whole) == 1
    assert timeline(free.spec, whole).timeline.peak_bytes.max() > timeline(job.spec, plan).timeline.peak_bytes.max()


def test_rounds_also_where_no_way_was_found_to_spread_images() -> None:
    """Of three images of 196 patches no rank of 300 keeps two, though two ranks hold 600."""
    job, samples = three_images(2, memory(256, 300))
    plan = plan_step(job, 0, samples)
    assert num_rounds(plan) == 2
    assert_rounds_keep_little(job, plan)


def three_images(dp: int, vit: dict[str, int], per_sample: int = 1) -> tuple[Job, StepSamples]:
    job = parse_job(colocated_data(dp, vit={"memory": vit}))
    sides, count = np.full((2, 3), 196, np.int32), 3 // per_sample
    offsets = np.arange(count + 1) * per_sample
    table = shard_table(job.stream, np.arange(count), np.full(count, 9), offsets, *sides)
    return job, size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)


@pytest.mark.parametrize(
    ("units", "error", "message"),
    [
        (
            290,
            SampleTooLargeError,
            "dataset laion, shard 0, row 0: its images have 588 patches, which module vit keeps until its backward "
            "phase, but memory.step_bytes holds 580 of a sample (lpt balance, 2 ranks); raise memory.step_bytes or dp",
        ),
        (
            300,
            BinBudgetError,
            "module vit keeps the 588 patches of this step until its backward phase, but memory.step_bytes holds 300 "
            "on each of 2 ranks, 600 together, and no way was found to spread them; raise memory.step_bytes or dp",
        ),
    ],
)
def test_a_sample_that_no_round_holds(units: int, error: type[ValueError], message: str) -> None:
    job, samples = three_images(2, memory(256, units), per_sample=3)
    with pytest.raises(error, match=re.escape(message)):
        plan_step(job, 0, samples)


@pytest.mark.parametrize("microbatches", [1 << 14, 4])
@pytest.mark.parametrize("packing", ["best_fit", "balanced"])
def test_sequences_that_no_round_holds_are_taken_apart(
    monkeypatch: pytest.MonkeyPatch, packing: str, microbatches: int
) -> None:
    """Packed, the five samples share one sequence with 5 x 196 patches, where two ranks keep one of 196 each.

    Also where plans have fewer microbatches than samples.
    """
    monkeypatch.setattr(plan_limits, "PLAN_LIMITS", {8: replace(PLAN_LIMITS[8], step_microbatches=microbatches)})
    data = colocated_data(2, vit={"memory": memory(256, 300)}, llm={"packing": packing}, batch=2)
    job = parse_job(data)
    table = shard_table(job.stream, np.arange(5), np.full(5, 9), np.arange(6), *np.full((2, 5), 196, np.int32))
    samples = size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)
    plan = plan_step(job, 0, samples)
    assert_rounds_keep_little(job, plan)
    assert num_rounds(plan) == 3
    said = [d.chosen for d in plan.decisions if d.subject == "step"]
    assert ("sequences taken apart" in said) == (packing != "balanced"), said


def test_sequences_taken_apart_get_as_many_microbatches_as_they_take() -> None:
    """Packed, eight samples share one sequence; two ranks keep the images of two of them."""
    vit, llm = {"memory": memory(256, 300)}, {"packing": "best_fit"}
    job = parse_job(colocated_data(2, vit=vit, llm=llm, batch=2))
    table = shard_table(job.stream, np.arange(8), np.full(8, 9), np.arange(9), *np.full((2, 8), 196, np.int32))
    samples = size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)
    packed, fewest = pack_step(job, samples, 1)
    assert (packed.tolist(), fewest) == ([0] * 8, 1)
    sequence, microbatches = pack_for_rounds(job, samples)(1)
    assert (sequence.tolist(), microbatches) == ([0, 0, 1, 1, 2, 2, 3, 3], 2)


def test_padded_images_of_a_sample_get_microbatches_of_their_own() -> None:
    """Beside one of 256 patches small ones would count as many."""
    job = parse_job(colocated_data(1, batch=2, vit={"padded": True, "memory": memory(256, 300)}))
    sides = np.array([[224, 224, 28, 28, 28]] * 2, np.int32)
    table = shard_table(job.stream, np.arange(2), np.full(2, 9), np.array([0, 1, 5]), *sides)
    layout_of(job.spec.execution).limits(job.spec).add(0, table, "shard")
    plan = plan_step(job, 0, size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table))
    assert_rounds_keep_little(job, plan)


def test_rounds_name_only_the_modules_that_ask_for_them() -> None:
    data = colocated_data(generator=True, vit={"memory": memory(256, 900)}, llm={"memory": memory(4000, 400_000)})
    plan = plan_step(parse_job(data), 0, make_samples(parse_job(data), 128, 3, 2))
    (reason,) = (d.reason for d in plan.decisions if "rounds" in d.chosen)
    assert reason == "in fewer, vit would keep more than memory.step_bytes holds until its backward phase"


@st.composite
def barely_accepted(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """Any policies, with memory for little more than an image; those of some samples that limits accept."""
    dp, balance = draw(st.integers(1, 5)), st.sampled_from(["lpt", "even", "none"])
    room = memory(256, draw(st.integers(256, 900)))
    vit = {"balance": draw(balance), "padded": draw(st.booleans()), "memory": room, "cost": QUADRATIC}
    llm = {"packing": draw(st.sampled_from(["best_fit", "balanced"]))}
    job = parse_job(colocated_data(dp, batch=dp * draw(st.integers(1, 3)), max_patches=256, vit=vit, llm=llm))
    rng, kept = np.random.default_rng(draw(st.integers(0, 999))), list[StepSamples]()
    for _ in range(draw(st.integers(1, 25))):
        table = make_table(job, rng, 1, 6)
        try:
            layout_of(job.spec.execution).limits(job.spec).add(0, table, "shard")
        except SampleTooLargeError:
            continue
        kept.append(size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table))
    return job, concatenate(kept) if kept else make_samples(job, 0)


@settings(max_examples=25, deadline=None)
@given(barely_accepted())
def test_what_a_job_accepts_when_it_is_created_is_planned(drawn: tuple[Job, StepSamples]) -> None:
    job, samples = drawn
    plan = plan_step(job, 0, samples)
    assert_rounds_keep_little(job, plan)
    assert sorted(plan.arrangement("llm").item.tolist()) == list(range(len(samples)))


def test_images_beside_their_sequences_that_a_rank_cannot_keep() -> None:
    data = colocated_data(vit={"balance": "none"})
    samples = make_samples(parse_job(data), 64, 3, 2)
    kept = of_step(parse_job(data), plan_step(parse_job(data), 0, samples), "vit")
    fits = parse_job(changed(data, (*MEMORY, ENCODER, "memory"), memory(900, max(kept))))
    assert max(of_step(fits, plan_step(fits, 0, samples), "vit")) <= max(kept)
    tight = parse_job(changed(data, (*MEMORY, ENCODER, "memory"), memory(900, -(-sum(kept) // 4) + 260)))
    plan = plan_step(tight, 0, samples)
    assert num_rounds(plan) > 1
    assert_rounds_keep_little(tight, plan)


def test_no_rounds_are_tried_for_a_sequence_whose_images_no_rank_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best fit packs the same sequences however many rounds there are: each would end in the same refusal."""
    data = colocated_data(vit={"balance": "none"}, llm={"packing": "best_fit"})
    samples = make_samples(parse_job(data), 300, 5)
    kept = bin_loads(samples.patches, pack_step(parse_job(data), samples)[0][samples.image_sample], 300)
    data["execution"]["modules"][ENCODER]["memory"] = memory(int(kept.max()) - 1, int(kept.max()) - 1)
    tried = list[int]()
    cut = rounds._cut
    monkeypatch.setattr(rounds, "_cut", lambda items, number, size: tried.append(number) or cut(items, number, size))
    found, _ = arrange_step(parse_job(data), samples)
    assert found.split_sequences
    assert 0 < len(tried) < 10
    with pytest.raises(BinBudgetError, match=f"the rank of a sequence would keep its {kept.max()} patches until"):
        rounds._in_fewest_rounds(parse_job(data), samples, partial(pack_step, parse_job(data), samples), 0)
    data["execution"]["modules"][ENCODER]["memory"] = memory(int(kept.max()), int(kept.max()))
    assert not arrange_step(parse_job(data), samples)[0].split_sequences


@st.composite
def tight_steps(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """Two encoders, with or without a generator, each with memory for a few samples of the step."""
    dp, generator = draw(st.integers(1, 4)), draw(st.booleans())
    cost = {**QUADRATIC, "microbatch_ns": draw(st.sampled_from([0, 5000]))}
    policies = st.sampled_from(["lpt", "none"])
    several = draw(st.integers(1, 4))
    vit = {
        "cost": cost,
        "padded": draw(st.booleans()),
        "memory": memory(1024, several * 1024),
        "balance": draw(policies),
    }
    llm = {"memory": memory(4000, several * 4000)} if generator and draw(st.booleans()) else {}
    batch = dp * draw(st.integers(1, 4))
    job = parse_job(colocated_data(dp, generator=generator, batch=batch, max_patches=256, vit=vit, llm=llm))
    return job, make_samples(job, draw(st.integers(1, 60)), draw(st.integers(0, 99)), draw(st.integers(0, 4)))


@settings(max_examples=30, deadline=None)
@given(tight_steps())
def test_rounds_of_any_policy_stay_within_memory(drawn: tuple[Job, StepSamples]) -> None:
    """Four images of 256 patches always fit a rank, so that every step has a plan; its rounds follow each other."""
    job, samples = drawn
    plan = plan_step(job, 0, samples)
    assert_rounds_keep_little(job, plan)
    assert sorted(np.concatenate([a.item for a in plan.arrangements if a.module == "llm"])) == list(range(len(samples)))
    images = [r.rows.sum() for r in plan.routings]
    assert sum(images) == sum(plan.samples.patches) // 4 or any(m.name == "dit" for m in job.spec.execution.modules)
    found = timeline(job.spec, plan)
    size = plan.num_microbatches // num_rounds(plan)
    listed = found.pipeline.operations[0]
    of_round = np.array([o.microbatch // size for o in listed if o.computes])
    assert (np.diff(of_round) >= 0).all()
    assert found.makespan_ns >= layout_of(job.spec.execution).lower_bound_ns(job, plan)
    found.pipeline.check()
