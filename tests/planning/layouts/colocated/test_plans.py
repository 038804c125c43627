"""Whole plans of colocated jobs: nothing lost, equal counts, caps kept, routings that join both arrangements."""

import re
from collections import Counter

import numpy as np
import pytest
from builders.colocated import MODULES, STREAM, colocated_job, colocated_steps, samples_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.job.fields import BalancePolicy, ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job, identify
from dataserver.planning.layouts.colocated.options import ColocatedOptions
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.arranging import module_images
from dataserver.planning.plan.expectation import microbatch_loads
from dataserver.planning.plan.plan import Routing, StepPlan, plan_hash
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import baseline_plan, explain, module_loads, plan_step, timeline
from dataserver.planning.stream.samples import StepSamples, Task
from dataserver.planning.stream.sizing import SampleTooLargeError, shard_table, size_samples

Step = tuple[Job, StepSamples]
Place = tuple[int, int, int]
"""Rank, microbatch, row."""


@settings(max_examples=80, deadline=None)
@given(colocated_steps())
def test_any_step(step: Step) -> None:
    job, samples = step
    plan = plan_step(job, 3, samples)
    assert plan.samples is samples
    check_every_item_has_one_rank(job, plan)
    check_counts_slots_and_memory(job, plan)
    check_routings_take_every_row_to_where_the_backbone_reads_it(job, plan)
    check_views_get_their_entries_of_every_routing(job, plan)
    check_no_policy_is_slower_than_the_sampling_layout_and_none_beats_the_bound(job, plan)
    check_the_assignment_to_ranks_changes_no_load_and_saves_bytes(job, plan)
    check_the_baseline_keeps_images_on_the_rank_of_their_sequence(job, baseline_plan(job, 3, samples))


def check_every_item_has_one_rank(job: Job, plan: StepPlan) -> None:
    samples = plan.samples
    assert [a.module for a in plan.arrangements] == [m.name for m in job.spec.execution.modules]
    for module in job.spec.execution.modules:
        found = plan.arrangement(module.name)
        backbone = module.kind is ModuleKind.BACKBONE
        wanted = np.arange(len(samples)) if backbone else module_images(job.spec, module, samples)
        assert sorted(found.item.tolist()) == wanted.tolist()
        assert set(found.rank.tolist()) <= set(range(module.dp))
        assert set(found.microbatch.tolist()) <= set(range(plan.num_microbatches))


def check_counts_slots_and_memory(job: Job, plan: StepPlan) -> None:
    """All ranks run as many microbatches; none holds more slots, tokens of a sequence, or units than it may."""
    execution, samples = job.spec.execution, plan.samples
    assert plan.num_microbatches * execution.backbone.dp * execution.microbatch >= job.stream.global_batch
    backbone = plan.arrangement("llm")
    places = list(zip(backbone.rank.tolist(), backbone.microbatch.tolist(), backbone.slot.tolist(), strict=True))
    assert all(0 <= slot < execution.microbatch for _, _, slot in places)
    tokens: Counter[Place] = Counter()
    for place, item in zip(places, backbone.item.tolist(), strict=True):
        tokens[place] += int(samples.tokens[item])
    assert max(tokens.values(), default=0) <= job.stream.seq_len
    assert job.stream.packing.enabled or max(Counter(places).values(), default=1) == 1
    for module in execution.modules:
        if module.memory is not None:
            assert max(held(module, plan).values(), default=0) <= module.memory.units


def held(module: ModuleSpec, plan: StepPlan) -> dict[tuple[int, int], int]:
    """Units of each microbatch."""
    found = plan.arrangement(module.name)
    sizes = plan.samples.tokens if module.kind is ModuleKind.BACKBONE else plan.samples.patches
    of: dict[tuple[int, int], list[int]] = {}
    for rank, microbatch, item in zip(found.rank.tolist(), found.microbatch.tolist(), found.item.tolist(), strict=True):
        of.setdefault((rank, microbatch), []).append(int(sizes[item]))
    return {place: len(s) * max(s) if module.padded else sum(s) for place, s in of.items()}


def check_routings_take_every_row_to_where_the_backbone_reads_it(job: Job, plan: StepPlan) -> None:
    """Row by row: both sides are filled without a gap, the backbone's in the order of its view."""
    spec = job.spec.execution
    filled: dict[Task, dict[Place, tuple[int, int]]] = {Task.UNDERSTANDING: {}, Task.GENERATION: {}}
    for module in spec.modules:
        if module.kind is ModuleKind.BACKBONE:
            continue
        into = module.kind is ModuleKind.ENCODER
        pair = (module.name, "llm") if into else ("llm", module.name)
        routing = next(r for r in plan.routings if (r.source_module, r.target_module) == pair)
        assert np.lexsort((routing.source_start, routing.source_rank, routing.source_microbatch)).tolist() == list(
            range(len(routing.rows))
        )
        own, backbone = (
            rows_of(routing, "source" if into else "target"),
            rows_of(routing, "target" if into else "source"),
        )
        at = rows_in_views(job, plan, module)
        assert len(set(own)) == len(own)
        assert set(own) == set(at)
        task = filled[Task.UNDERSTANDING if into else Task.GENERATION]
        assert not task.keys() & set(backbone)
        task.update({there: at[here] for here, there in zip(own, backbone, strict=True)})
    assert len(plan.routings) == len(spec.modules) - 1
    for task, rows in filled.items():
        assert rows == rows_in_backbone(job, plan, task)


def rows_of(routing: Routing, side: str) -> list[Place]:
    """Every row of every entry."""
    columns = (getattr(routing, f"{side}_{name}").tolist() for name in ("rank", "microbatch", "start"))
    entries = zip(*columns, routing.rows.tolist(), strict=True)
    return [(rank, microbatch, start + i) for rank, microbatch, start, rows in entries for i in range(rows)]


def rows_in_views(job: Job, plan: StepPlan, module: ModuleSpec) -> dict[Place, tuple[int, int]]:
    """Image and number of each row that the views of an encoder or generator have."""
    found: dict[Place, tuple[int, int]] = {}
    for rank in range(module.dp):
        for microbatch in range(plan.num_microbatches):
            row = 0
            for image in view_plan(job.spec, plan, module.name, rank, microbatch).items.tolist():
                for i in range(num_rows(job, plan, image)):
                    found[rank, microbatch, row] = image, i
                    row += 1
    return found


def rows_in_backbone(job: Job, plan: StepPlan, task: Task) -> dict[Place, tuple[int, int]]:
    """The same of the backbone: images of its samples, sample after sample, as its embedding slots are."""
    found: dict[Place, tuple[int, int]] = {}
    for rank in range(job.spec.execution.backbone.dp):
        for microbatch in range(plan.num_microbatches):
            row = 0
            for sample in view_plan(job.spec, plan, "llm", rank, microbatch).items.tolist():
                for image in range(*plan.samples.image_offsets[sample : sample + 2].tolist()):
                    for i in range(num_rows(job, plan, image) if plan.samples.task[sample] == task else 0):
                        found[rank, microbatch, row] = image, i
                        row += 1
    return found


def num_rows(job: Job, plan: StepPlan, image: int) -> int:
    understood = plan.samples.task[plan.samples.image_sample[image]] == Task.UNDERSTANDING
    return int(plan.samples.patches[image]) // 4 if understood else job.stream.generation.query_tokens


def check_views_get_their_entries_of_every_routing(job: Job, plan: StepPlan) -> None:
    for module in job.spec.execution.modules:
        entries: Counter[tuple[str, str, Place]] = Counter()
        for rank in range(module.dp):
            for microbatch in range(plan.num_microbatches):
                for routing in view_plan(job.spec, plan, module.name, rank, microbatch).routings:
                    side = "source" if routing.source_module == module.name else "target"
                    rows = rows_of(routing, side)
                    assert {(r, m) for r, m, _ in rows} <= {(rank, microbatch)}
                    entries.update((routing.source_module, routing.target_module, row) for row in rows)
        expected: Counter[tuple[str, str, Place]] = Counter()
        for routing in plan.routings:
            if module.name in (routing.source_module, routing.target_module):
                side = "source" if routing.source_module == module.name else "target"
                ends = routing.source_module, routing.target_module
                expected.update((*ends, row) for row in rows_of(routing, side))
        assert entries == expected


def check_no_policy_is_slower_than_the_sampling_layout_and_none_beats_the_bound(job: Job, plan: StepPlan) -> None:
    """Of the same sequences, that is; in as many microbatches."""
    modules = tuple(m.model_copy(update={"balance": BalancePolicy.NONE}) for m in job.spec.execution.modules)
    execution = job.spec.execution.model_copy(update={"modules": modules})
    none = identify(job.spec.model_copy(update={"execution": execution}))
    canonical = plan_step(none, 3, plan.samples)
    if canonical.num_microbatches == plan.num_microbatches:
        before, after = module_loads(none.spec, canonical), module_loads(job.spec, plan)
        assert all(after[name].max() <= before[name].max() for name in after if balances_sizes(job, name))
    for spec, found in ((job, plan), (none, canonical)):
        bound = layout_of(spec.spec.execution).lower_bound_ns(spec, found)
        assert 0 <= bound <= timeline(spec.spec, found).makespan_ns


def balances_sizes(job: Job, name: str) -> bool:
    """Equal counts may be slower than no balance at all."""
    return job.spec.execution.module(name).balance not in (BalancePolicy.NONE, BalancePolicy.EVEN)


def check_the_baseline_keeps_images_on_the_rank_of_their_sequence(job: Job, plan: StepPlan) -> None:
    backbone, samples = plan.arrangement("llm"), plan.samples
    rank = dict(zip(backbone.item.tolist(), backbone.rank.tolist(), strict=True))
    for module in job.spec.execution.modules:
        found = plan.arrangement(module.name)
        sample = found.item if module.name == "llm" else samples.image_sample[found.item]
        assert [rank[s] for s in sample.tolist()] == found.rank.tolist()
    assert not [d for d in plan.decisions if d.chosen == "batches reassigned"]
    for routing in plan.routings:
        assert routing.source_rank.tolist() == routing.target_rank.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_is_faster_and_moves_fewer_bytes_between_nodes(seed: int) -> None:
    job = colocated_job(MODULES, microbatch=2, **STREAM)
    samples = samples_of(job, (60, 30), seed, 3)
    plan = plan_step(job, 0, samples)
    summary = explain(job, plan)
    assert summary.after.makespan_ns < summary.before.makespan_ns
    assert summary.after.makespan_ns * 100 < summary.bound_ns * 103
    assert crossing(plan, 2) < crossing(on_one_node(job, samples), 2)


def check_the_assignment_to_ranks_changes_no_load_and_saves_bytes(job: Job, plan: StepPlan) -> None:
    """On one node it saves nothing: batches stay as numbered, and have no fewer bytes between nodes of this size."""
    numbered = on_one_node(job, plan.samples)
    layout = job.spec.execution.layout
    assert isinstance(layout, ColocatedOptions)
    assert crossing(plan, layout.ranks_per_node) <= crossing(numbered, layout.ranks_per_node)
    for module in job.spec.execution.modules:
        loads = [microbatch_loads(module, p).tolist() for p in (plan, numbered)]
        if balances_sizes(job, module.name):
            assert sorted(map(sorted, loads[0])) == sorted(map(sorted, loads[1]))
    assert not [d for d in numbered.decisions if d.chosen == "batches reassigned"]


def on_one_node(job: Job, samples: StepSamples) -> StepPlan:
    execution = job.spec.execution
    layout = execution.layout.model_copy(update={"ranks_per_node": execution.backbone.dp})
    return plan_step(
        identify(job.spec.model_copy(update={"execution": execution.model_copy(update={"layout": layout})})), 3, samples
    )


def crossing(plan: StepPlan, ranks_per_node: int) -> int:
    """Rows between nodes."""
    return sum(
        int(r.rows[r.source_rank // ranks_per_node != r.target_rank // ranks_per_node].sum()) for r in plan.routings
    )


def test_decisions_say_what_was_chosen_and_why() -> None:
    modules = [{**m, "balance": "none"} if m["name"] == "dit" else m for m in MODULES]
    modules[0] = {**modules[0], "memory": {"budget_bytes": 300_000, "unit_bytes": 1_000}}
    job = colocated_job(modules, microbatch=8, **STREAM)
    samples = samples_of(job, (60, 30), 0, 3)
    plan, numbered = plan_step(job, 0, samples), on_one_node(job, samples)
    said = [(d.subject, d.chosen) for d in plan.decisions]
    assert said[0] == ("step", f"{plan.num_microbatches} microbatches of each rank")
    assert plan.decisions[0].reason == "1 hold the sequences, but not within the memory of vit"
    assert said[1][1].endswith("MB of activations")
    assert said[2:5] == [("vit", "lpt"), ("llm", "lpt"), ("dit", "images beside their sequences")]
    number = r"1\.\d{3}"
    said_of_loads = rf"largest / mean load of the ranks {number}, of the same sequences in canonical order {number}"
    assert re.fullmatch(said_of_loads, plan.decisions[2].reason)
    assert said[5:] == [("vit", "batches reassigned")]
    now, before = (crossing(p, 2) * 512 // 1000 for p in (plan, numbered))
    assert plan.decisions[5].reason.startswith(f"{now:,} kB between nodes, {before:,} kB before; ")
    assert now < before
    assert [(d.subject, d.chosen) for d in numbered.decisions[5:]] == [("vit", "batches as numbered")]
    assert numbered.decisions[5].reason == "no byte saved: 0 kB between nodes"


def test_memory_raises_the_number_of_microbatches_of_all_ranks() -> None:
    """300 patches hold one large image or a few small ones."""
    roomy = colocated_job(MODULES, microbatch=2, **STREAM)
    samples = samples_of(roomy, (60, 30), 1, 3)
    memory = {"budget_bytes": 300, "unit_bytes": 1}
    tight = colocated_job([{**MODULES[0], "memory": memory}, *MODULES[1:]], microbatch=2, **STREAM)
    few, many = plan_step(roomy, 0, samples), plan_step(tight, 0, samples)
    assert few.num_microbatches == 4
    patches = int(samples.patches[few.arrangement("vit").item].sum())
    fewest = -(-patches // (4 * 300))
    assert fewest <= many.num_microbatches <= 2 * fewest
    assert max(held(tight.spec.execution.module("vit"), many).values()) <= 300


@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_that_memory_does_not_hold_is_named(packed: bool) -> None:
    memory = {"budget_bytes": 20, "unit_bytes": 1}
    for number, unit in ((0, "patches of an image"), (1, "tokens")):
        modules = [{**m, "memory": memory} if i == number else m for i, m in enumerate(MODULES)]
        job = colocated_job(modules, packing={"enabled": packed}, **STREAM)
        samples = samples_of(job, (5, 0), 1, 1)
        name = modules[number]["name"]
        message = rf"dataset laion, shard 0, row \d+: \d+ {unit}, but the memory of module {name} holds 20; raise its"
        with pytest.raises(SampleTooLargeError, match=message):
            plan_step(job, 0, samples)


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_the_same_input_gives_the_same_plan(seed: int) -> None:
    job = colocated_job(MODULES, microbatch=2, **STREAM)
    samples = samples_of(job, (30, 10), seed, 3)
    first, again = plan_step(job, 0, samples), plan_step(job, 0, samples)
    assert first.hash == again.hash
    assert first.decisions == again.decisions


def test_a_step_without_samples_has_a_plan() -> None:
    job = colocated_job(MODULES, **STREAM)
    plan = plan_step(job, 0, samples_of(job, (0, 0), 0, 0))
    assert plan.num_microbatches == 8
    assert explain(job, plan).bound_ns == timeline(job.spec, plan).makespan_ns > 0


def test_a_padded_backbone_does_not_pack() -> None:
    modules = [{"name": "llm", "kind": "backbone", "padded": True}]
    colocated_job(modules, packing={"enabled": False})
    with pytest.raises(ValueError, match=r"module llm is padded but the stream packs .* set stream.packing.enabled"):
        colocated_job(modules)


def test_golden_plan() -> None:
    """The same on every machine, Python and numpy; whatever the job's id."""
    memory = {"budget_bytes": 600, "unit_bytes": 1}
    job = colocated_job([{**MODULES[0], "memory": memory, "padded": True}, *MODULES[1:]], microbatch=2, **STREAM)
    row = np.arange(64)
    sides = (16 + row * 37 % 300).astype(np.int32)
    table = shard_table(job.stream, row, 1 + row * 53 % 120, np.arange(65), sides, sides[::-1])
    plan = plan_step(job, 2, size_samples(job.stream, 0, 0, row.astype(np.uint64), table))
    found = plan_hash(6, "0" * 64, plan.step, plan).hex()
    assert found == "47470ca8c46ce401db25b137b40d083d5d988d14906d91189ea6a7576b53453c"
