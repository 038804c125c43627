"""Whole plans of random steps: nothing lost, equal counts, routings that cover both sides."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from builders.jobs import make_job
from builders.pipelined import steps
from builders.samples import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.costs.model import forward_ns
from dataserver.planning.job.fields import ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.arranging import spread_images
from dataserver.planning.plan.plan import Routing, StepPlan
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import explain, plan_step, timeline
from dataserver.planning.stream.samples import StepSamples, Task
from dataserver.planning.stream.sizing import concatenate


def check_no_policy_touches_the_samples(job: Job, plan: StepPlan) -> None:
    assert sorted(plan.arrangement("llm").item.tolist()) == list(range(len(plan.samples)))
    for module in job.spec.execution.modules:
        if module.kind is ModuleKind.BACKBONE:
            continue
        task = Task.UNDERSTANDING if module.kind is ModuleKind.ENCODER else Task.GENERATION
        images = np.flatnonzero(plan.samples.task[plan.samples.image_sample] == task)
        assert sorted(plan.arrangement(module.name).item.tolist()) == images.tolist()
    assert [a.module for a in plan.arrangements] == [m.name for m in job.spec.execution.modules]


def check_counts_slots_and_lengths(job: Job, plan: StepPlan) -> None:
    execution, backbone = job.spec.execution, plan.arrangement("llm")
    slots = execution.backbone.dp * execution.microbatch
    assert plan.sequences_per_microbatch == execution.microbatch
    assert plan.num_microbatches >= job.stream.global_batch // slots
    tokens: Counter[tuple[int, int, int]] = Counter()
    held: Counter[tuple[int, int, int]] = Counter()
    for i, item in enumerate(backbone.item):
        place = int(backbone.rank[i]), int(backbone.microbatch[i]), int(backbone.slot[i])
        tokens[place] += int(plan.samples.tokens[item])
        held[place] += 1
    assert all(0 <= r < execution.backbone.dp for r, _, _ in tokens)
    assert all(0 <= m < plan.num_microbatches for _, m, _ in tokens)
    assert all(0 <= s < execution.microbatch for _, _, s in tokens)
    assert all(n <= job.stream.seq_len for n in tokens.values())
    assert job.stream.packing.enabled or set(held.values()) <= {1}
    # Every rank has room for the same number of sequences, and no microbatch could be smaller if there were more.
    needed = max(job.stream.global_batch, len(tokens))
    most = max(-(-needed // slots), -(-len(plan.samples) // execution.backbone.dp))
    assert -(-needed // slots) <= plan.num_microbatches <= most


def check_waves_and_starts(job: Job, plan: StepPlan) -> None:
    backbone = plan.arrangement("llm")
    wave_of_sample = dict(zip(backbone.item.tolist(), backbone.microbatch.tolist(), strict=True))
    sizes = {"llm": plan.samples.tokens, "vit": plan.samples.patches // 4}
    for arrangement in plan.arrangements:
        order = np.lexsort((arrangement.start, arrangement.microbatch, arrangement.rank))
        assert order.tolist() == list(range(len(order)))
        if arrangement.module != "llm":
            for item, wave in zip(arrangement.item.tolist(), arrangement.microbatch.tolist(), strict=True):
                assert wave == wave_of_sample[int(plan.samples.image_sample[item])]
        rows = sizes.get(arrangement.module, np.full(len(plan.samples.patches), job.stream.generation.query_tokens))
        expected: Counter[tuple[int, int]] = Counter()
        before: Counter[tuple[int, int]] = Counter()
        for i, item in enumerate(arrangement.item.tolist()):
            key = int(arrangement.rank[i]), int(arrangement.microbatch[i])
            assert arrangement.start[i] == expected[key]
            assert arrangement.module == "llm" or arrangement.slot[i] == before[key]
            expected[key] += int(rows[item])
            before[key] += 1


def covered(routing: Routing, side: str) -> dict[tuple[int, int], list[int]]:
    """For each (rank, wave) of one side the rows that the routing names, sorted."""
    rows: dict[tuple[int, int], list[int]] = {}
    ranks, starts = getattr(routing, f"{side}_rank"), getattr(routing, f"{side}_start")
    for rank, wave, start, count in zip(ranks, routing.source_microbatch, starts, routing.rows, strict=True):
        rows.setdefault((int(rank), int(wave)), []).extend(range(int(start), int(start + count)))
    return {key: sorted(found) for key, found in rows.items()}


def check_routings_are_bijections_of_rows(job: Job, plan: StepPlan) -> None:
    backbone = plan.arrangement("llm")
    others = [m for m in job.spec.execution.modules if m.name != "llm"]
    assert {(r.source_module, r.target_module) for r in plan.routings} == {
        (m.name, "llm") if m.kind is ModuleKind.ENCODER else ("llm", m.name) for m in others
    }
    for routing in plan.routings:
        into = routing.target_module == "llm"
        other = plan.arrangement(routing.source_module if into else routing.target_module)
        side, other_side = ("target", "source") if into else ("source", "target")
        rows = {i: _rows(job, plan, i, into) for i in other.item.tolist()}
        totals: Counter[tuple[int, int]] = Counter()
        for item, rank, wave in zip(other.item, other.rank, other.microbatch, strict=True):
            totals[int(rank), int(wave)] += rows[int(item)]
        found = covered(routing, other_side)
        assert found == {key: list(range(total)) for key, total in totals.items()}
        # The backbone's rows: images of its samples, sample after sample in the order of the view.
        task = Task.UNDERSTANDING if into else Task.GENERATION
        places: dict[int, tuple[int, int, int]] = {}
        filled: Counter[tuple[int, int]] = Counter()
        for sample, rank, wave in zip(backbone.item, backbone.rank, backbone.microbatch, strict=True):
            if plan.samples.task[sample] == task:
                for image in range(*plan.samples.image_offsets[sample : sample + 2].tolist()):
                    places[image] = int(rank), int(wave), filled[int(rank), int(wave)]
                    filled[int(rank), int(wave)] += rows[image]
        assert covered(routing, side) == {key: list(range(total)) for key, total in filled.items()}
        # Entry by entry: the same image on both sides.
        here = dict(zip(places.values(), places.keys(), strict=True))
        there = {
            (int(r), int(m), int(s)): int(i)
            for i, r, m, s in zip(other.item, other.rank, other.microbatch, other.start, strict=True)
        }
        ours, theirs = (
            (getattr(routing, f"{side}_rank"), getattr(routing, f"{side}_start")),
            (
                getattr(routing, f"{other_side}_rank"),
                getattr(routing, f"{other_side}_start"),
            ),
        )
        for k, (wave, count) in enumerate(zip(routing.source_microbatch.tolist(), routing.rows.tolist(), strict=True)):
            image = here[int(ours[0][k]), wave, int(ours[1][k])]
            assert image == there[int(theirs[0][k]), wave, int(theirs[1][k])]
            assert count == rows[image]
        order = np.lexsort((routing.source_start, routing.source_rank, routing.source_microbatch))
        assert order.tolist() == list(range(len(order)))


def _rows(job: Job, plan: StepPlan, image: int, into: bool) -> int:
    return int(plan.samples.patches[image]) // 4 if into else job.stream.generation.query_tokens


@settings(max_examples=80)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_images_are_spread_evenly_over_their_component(
    components: int, width: int, ranks: int, data: st.DataObject
) -> None:
    """Greedy: up to any wave no rank is above its component's mean by more than the largest image."""
    module = ModuleSpec(name="vit", kind=ModuleKind.ENCODER, dp=components * width)
    images = st.tuples(st.integers(0, components * ranks - 1), st.integers(0, 3), st.integers(0, 1000))
    drawn = sorted(data.draw(st.lists(images, max_size=40)))
    backbone_rank, wave, sizes = np.array(drawn, np.int64).reshape(-1, 3).T
    loads = forward_ns(module.cost, sizes)
    rank = spread_images(module, sizes, backbone_rank, wave, components * ranks, components)
    assert np.array_equal(rank // width, backbone_rank // ranks)
    for component in range(components):
        for last in range(4):
            mine = (rank // width == component) & (wave <= last)
            finish = np.bincount(rank[mine] - component * width, loads[mine], minlength=width).astype(np.int64)
            assert finish.max() * width <= finish.sum() + (width - 1) * loads[mine].max(initial=0)


def check_views_cover_the_plan_once(job: Job, plan: StepPlan) -> None:
    for module in job.spec.execution.modules:
        arrangement = plan.arrangement(module.name)
        views = [
            view_plan(job.spec, plan, module.name, rank, wave)
            for rank in range(module.dp)
            for wave in range(plan.num_microbatches)
        ]
        assert np.array_equal(np.concatenate([v.items for v in views]), arrangement.item)
        assert np.array_equal(np.concatenate([v.slots for v in views]), arrangement.slot)
        assert np.array_equal(np.concatenate([v.starts for v in views]), arrangement.start)
        for number, routing in enumerate(r for r in plan.routings if module.name in (r.source_module, r.target_module)):
            mine = [v.routings[number] for v in views]
            assert sum(len(r.rows) for r in mine) == len(routing.rows)
            assert sorted(_entries(mine)) == sorted(_entries([routing]))
    with pytest.raises(ValueError, match=r"rank \d+ of module llm does not exist; its dp is \d+"):
        view_plan(job.spec, plan, "llm", job.spec.execution.backbone.dp, 0)
    with pytest.raises(ValueError, match=r"microbatch \d+ does not exist; step 3 has \d+"):
        view_plan(job.spec, plan, "llm", 0, plan.num_microbatches)
    with pytest.raises(ValueError, match=r"module 'nobody' is not in the job; it has \["):
        view_plan(job.spec, plan, "nobody", 0, 0)


def _entries(routings: list[Routing]) -> list[tuple[int, ...]]:
    names = [f.name for f in fields(Routing) if not f.name.endswith("_module")]
    return [entry for r in routings for entry in zip(*(getattr(r, n).tolist() for n in names), strict=True)]


def check_denominators_are_the_targets_of_the_step(job: Job, plan: StepPlan) -> None:
    samples = plan.samples
    text = patches = 0
    for i in range(len(samples)):
        if samples.task[i] == Task.UNDERSTANDING:
            text += int(samples.text_tokens[i]) + 1  # EOS is a target too
        else:
            patches += int(samples.patches[samples.image_offsets[i]])
    assert (plan.text_tokens, plan.target_patches) == (text, patches)


@settings(max_examples=120, deadline=None)
@given(steps())
def test_any_step(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    plan = plan_step(job, 3, samples)
    assert plan.samples is samples
    check_no_policy_touches_the_samples(job, plan)
    check_counts_slots_and_lengths(job, plan)
    check_waves_and_starts(job, plan)
    check_routings_are_bijections_of_rows(job, plan)
    check_views_cover_the_plan_once(job, plan)
    check_denominators_are_the_targets_of_the_step(job, plan)


def test_policies_make_a_skewed_step_faster_and_never_slower() -> None:
    gains = []
    for seed in range(8):
        job = make_job(stream={"global_batch": 48, "seq_len": 2048, "packing": {"enabled": False}}, backbone=(4, 2))
        plan = plan_step(job, 0, make_samples(job, 48, seed, 3))
        summary = explain(job, plan)
        assert summary.after.makespan_ns <= summary.before.makespan_ns
        assert sum(summary.loads_after["llm"].tolist()) == sum(summary.loads_before["llm"].tolist())
        gains.append(summary.before.makespan_ns - summary.after.makespan_ns)
    assert sum(gains) > 0


def test_policies_none_deal_the_samples_out_in_canonical_order() -> None:
    layout = {"kind": "pipelined", "order": "none"}
    job = make_job(
        stream={"global_batch": 8, "packing": {"enabled": False}},
        execution={"layout": layout},
        backbone=(2, 1),
        balance="none",
    )
    plan = plan_step(job, 0, make_samples(job, 8))
    backbone = plan.arrangement("llm")
    assert backbone.item.tolist() == list(range(8))
    assert backbone.rank.tolist() == [0] * 4 + [1] * 4
    assert backbone.microbatch.tolist() == [0, 1, 2, 3] * 2


def test_a_step_without_samples_has_a_plan() -> None:
    for packed in (False, True):
        job = make_job(stream={"global_batch": 4, "packing": {"enabled": packed}}, generator=2, backbone=(2, 2))
        plan = plan_step(job, 0, concatenate([]))
        assert (plan.num_microbatches, plan.text_tokens, plan.target_patches) == (2, 0, 0)
        assert timeline(job.spec, plan).makespan_ns > 0


def test_one_microbatch_more_where_the_packer_needs_it() -> None:
    # Six samples of 70 % of a sequence do not fit the four planned sequences.
    job = make_job(stream={"global_batch": 4, "seq_len": 100}, backbone=(2, 1))
    samples = make_samples(make_job(stream={"seq_len": 100}), 6, 0, 0)
    samples = replace(samples, tokens=np.full(6, 70, np.int64), text_tokens=np.full(6, 68, np.int64))
    assert plan_step(job, 0, samples).num_microbatches == 3
