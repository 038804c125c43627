"""Plans of jobs with sequence groups: what holds for every job, and the published experiment as a job."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from builders.grouped import A100, grouped_data, grouped_steps, published_job
from builders.matrix import matrix, samples_of
from builders.samples import make_samples, texts
from hypothesis import given, settings
from planning.simulation.reference import Definitions, Event

from dataserver.planning import I64
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import Job, JobSpecError, parse_job
from dataserver.planning.layouts.grouped import planner
from dataserver.planning.layouts.grouped.bounds import bound_ns
from dataserver.planning.layouts.grouped.costs import GroupCosts
from dataserver.planning.layouts.grouped.homogeneous import homogeneous_plan
from dataserver.planning.layouts.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.layouts.grouped.policies import bounded_budget, is_quick, quick_plan
from dataserver.planning.layouts.grouped.search import Budget
from dataserver.planning.layouts.grouped.sequence_plan import SequencePlan, plan_groups
from dataserver.planning.layouts.grouped.sequences import group_costs, planned_sequences
from dataserver.planning.layouts.interface import PlannedTimeline
from dataserver.planning.plan.arranging import WaveTooLargeError
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import baseline_plan, explain, module_loads, plan_step, timeline
from dataserver.planning.simulation import critical_path
from dataserver.planning.stream.samples import StepSamples, Task
from dataserver.planning.stream.sizing import SampleTooLargeError

STEPS = settings(deadline=None, max_examples=40)


def check_groups(job: Job, plan: StepPlan) -> None:
    """Groups make up all ranks of every microbatch, hold what they have room for, and are named by first ranks."""
    backbone = job.spec.execution.backbone
    options = job.spec.execution.options(GroupedOptions)
    assert backbone.memory is not None
    found = plan.arrangement(backbone.name)
    for microbatch in range(plan.num_microbatches):
        here = plan.groups.of(microbatch)
        firsts, degrees = plan.groups.first_rank[here], plan.groups.degree[here]
        assert firsts.tolist() == (np.cumsum(degrees) - degrees).tolist()
        assert degrees.sum() == backbone.dp
        assert set(degrees.tolist()) <= {1 << p for p in range(17)}
        assert options.min_degree <= degrees.min()
        assert degrees.max() <= options.max_degree
        assert (firsts % degrees == 0).all()
        mine = found.microbatch == microbatch
        assert set(found.rank[mine].tolist()) <= set(firsts.tolist())
        for first, degree in zip(firsts.tolist(), degrees.tolist(), strict=True):
            items = found.of(first, microbatch)
            tokens = plan.samples.tokens[found.item[items]]
            assert tokens.sum() <= degree * backbone.memory.units
            assert found.start[items].tolist() == (np.cumsum(tokens) - tokens).tolist()
            slots = np.unique(found.slot[items])
            assert slots.tolist() == list(range(len(slots)))
            assert len(slots) <= plan.sequences_per_microbatch


@STEPS
@given(grouped_steps())
def test_every_sample_once_within_memory_on_groups_that_make_up_all_ranks(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    plan = plan_step(job, 3, samples)
    backbone = job.spec.execution.backbone
    assert plan.samples is samples
    assert plan.num_microbatches >= 1
    assert np.sort(plan.arrangement(backbone.name).item).tolist() == list(range(len(samples)))
    check_groups(job, plan)
    for routing in plan.routings:
        assert routing.source_microbatch.tolist() == routing.target_microbatch.tolist()
    sequences = planned_sequences(backbone, plan)
    assert sequences.lengths.sum() == samples.tokens.sum()
    assert sequences.lengths.max(initial=0) <= min(600, group_costs(job.spec.execution).cluster_tokens)
    if not job.stream.packing.enabled:
        assert len(sequences.lengths) == len(samples)
    for module in job.spec.execution.modules:
        if module.kind is not ModuleKind.BACKBONE:
            task = Task.UNDERSTANDING if module.kind is ModuleKind.ENCODER else Task.GENERATION
            images = np.flatnonzero(samples.task[samples.image_sample] == task)
            assert np.sort(plan.arrangement(module.name).item).tolist() == images.tolist()


@STEPS
@given(grouped_steps())
def test_peers_have_the_view_of_their_group_and_views_cover_the_plan(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    plan, backbone = plan_step(job, 0, samples), job.spec.execution.backbone
    seen: list[int] = []
    for microbatch in range(plan.num_microbatches):
        here = plan.groups.of(microbatch)
        for first, degree in zip(plan.groups.first_rank[here].tolist(), plan.groups.degree[here].tolist(), strict=True):
            views = [view_plan(job.spec, plan, backbone.name, r, microbatch) for r in range(first, first + degree)]
            seen += views[0].items.tolist()
            rows = 0
            for view in views:
                for mine, theirs in ((views[0].items, view.items), (views[0].slots, view.slots)):
                    assert mine.tolist() == theirs.tolist()
                assert view.starts.tolist() == views[0].starts.tolist()
                for routing, other in zip(views[0].routings, view.routings, strict=True):
                    assert routing.target_start.tolist() == other.target_start.tolist()
                    assert routing.source_rank.tolist() == other.source_rank.tolist()
            for routing in views[0].routings:
                if routing.target_module == backbone.name:
                    rows += int(routing.rows.sum())
            understood = views[0].items[samples.task[views[0].items] == Task.UNDERSTANDING]
            images = np.isin(samples.image_sample, understood)
            assert rows == (samples.patches[images] // job.stream.sizing.merge**2).sum()
    assert sorted(seen) == list(range(len(samples)))


@STEPS
@given(grouped_steps())
def test_times_candidates_bounds_and_memory(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    plan = plan_step(job, 0, samples)
    summary = explain(job, plan)
    planned = summary.after
    assert not plan.candidates or planned.makespan_ns == plan.candidates[0].makespan_ns
    times = [c.makespan_ns for c in plan.candidates]
    assert times == sorted(times)
    assert summary.bound_ns <= planned.makespan_ns
    assert planned.timeline.end_ns.max() == planned.makespan_ns
    path = critical_path(planned.pipeline, planned.timeline)
    assert sum(o.end_ns - o.start_ns for o in path) == planned.makespan_ns
    assert all(a.end_ns == b.start_ns for a, b in pairwise(path))
    for module in job.spec.execution.modules:
        mine = [n for n, node in enumerate(planned.nodes) if node.modules == (module.name,)]
        if module.memory is not None:
            assert planned.timeline.peak_bytes[mine].max() <= module.memory.budget_bytes
        forward = planned.pipeline.forward_ns[mine].sum(axis=1)
        assert forward.tolist() == module_loads(job.spec, plan)[module.name].tolist()
    by_kind = [m for kind in ModuleKind for m in job.spec.execution.of_kind(kind)]
    assert all(plan.in_flight(m.name)[0] == 1 for m in by_kind if not m.runs_backward)
    held = [plan.in_flight(m.name)[0] for m in by_kind if m.runs_backward]
    assert all(a >= b >= 1 for a, b in pairwise(held))
    assert {d.subject for d in plan.decisions} - {"step"} == {m.name for m in job.spec.execution.modules}


def in_step(planned: PlannedTimeline, backbone: str) -> dict[Event, tuple[int, int]]:
    """Start and end by definition: every pass of the backbone begins when all its ranks can begin, and is done when all
    of them are."""
    definitions = Definitions(planned.pipeline)
    events = definitions.events()
    ranks = [n for n, node in enumerate(planned.nodes) if node.modules == (backbone,)]
    needs = {e: set(definitions.needs(e, events)) for e in events}
    for node, stage in enumerate(planned.pipeline.stage.tolist()):
        for before, operation in pairwise(planned.pipeline.operations[stage]):
            needs[node, operation].add((node, before))
    for rank, operation in [e for e in events if e[0] in ranks]:
        needs[rank, operation] = set().union(*(needs[r, operation] for r in ranks)) - {(r, operation) for r in ranks}
    for event in events:
        needs[event] |= {(r, o) for n, o in needs[event] if n in ranks for r in ranks}
    ends: dict[Event, int] = {}
    while len(ends) < len(events):
        ready = [e for e in events if e not in ends and needs[e] <= ends.keys()]
        assert ready
        for event in ready:
            ends[event] = max((ends[e] for e in needs[event]), default=0) + definitions.duration(event)
    return {e: (end - definitions.duration(e), end) for e, end in ends.items()}


@settings(deadline=None, max_examples=12)
@given(grouped_steps())
def test_the_timeline_is_that_of_the_definitions(step: tuple[Job, StepSamples]) -> None:
    job, samples = step
    planned = timeline(job.spec, plan_step(job, 0, samples))
    for (node, operation), span in in_step(planned, "llm").items():
        position = planned.pipeline.operations[int(planned.pipeline.stage[node])].index(operation)
        found = planned.timeline.start_ns[node, position], planned.timeline.end_ns[node, position]
        assert found == span


def skewed(count: int) -> StepSamples:
    raw = np.random.Generator(np.random.PCG64(5)).lognormal(6.2, 1.4, count).astype(np.int64)
    return texts(np.clip(-(-raw // 128) * 128, 128, 191_872))


@pytest.mark.parametrize("backward_percent", [0, 100])
def test_the_published_model_as_a_job(backward_percent: int) -> None:
    """A step takes what the planner of groups says, to the nanosecond."""
    job, samples = published_job(backward_percent=backward_percent), skewed(512)
    assert group_costs(job.spec.execution).token_ps == A100.token_ps
    plan = plan_step(job, 0, samples)
    groups = plan_groups(samples.tokens, A100)
    summary = explain(job, plan)
    assert plan.candidates[0].name == "unequal groups by search"
    assert summary.after.makespan_ns == groups.time_ns
    assert summary.bound_ns == groups.bound_ns
    assert summary.before.makespan_ns == homogeneous_plan(samples.tokens, A100).time_ns
    assert plan.num_microbatches == len(groups.microbatches)


def test_the_toy_of_the_paper_as_a_job() -> None:
    plan = plan_step(published_job(), 0, texts(np.array([100_000, 48_000, 48_000, 48_000, 48_000])))
    (decision,) = plan.decisions
    assert (decision.subject, decision.chosen) == ("llm", "groups <32, 8 x 4>")
    assert decision.reason == (
        "simulated 3,858.9 ms for unequal groups by search; 4,882.1 ms for static, groups of 64. The fullest device "
        "holds 6,000 of 6,449 tokens, in a group of 8 in microbatch 0"
    )
    loads = module_loads(published_job().spec, plan)["llm"]
    assert len(set(loads[:32].tolist())) == 1
    assert len(set(loads[32:].tolist())) == 1


@pytest.mark.parametrize("policy", ["search", "homogeneous", "static"])
def test_policies_in_order(policy: str) -> None:
    samples = skewed(256)
    plan = plan_step(published_job(policy), 0, samples)
    makespans = {c.name.partition(",")[0]: c.makespan_ns for c in plan.candidates}
    expected = {
        "search": ["unequal groups by search", "one degree by quick search", "one degree by best fit", "static"],
        "homogeneous": ["one degree by search", "one degree by best fit", "static"],
        "static": [],  # nothing to choose from
    }
    assert list(makespans) == expected[policy]
    degrees = [set(plan.groups.degree[plan.groups.of(k)].tolist()) for k in range(plan.num_microbatches)]
    assert (max(map(len, degrees)) > 1) is (policy == "search")
    assert policy != "static" or degrees == [{64}] * plan.num_microbatches


def test_the_baseline_is_static() -> None:
    job, samples = published_job(), skewed(64)
    plan = baseline_plan(job, 0, samples)
    assert set(plan.groups.degree.tolist()) == {64}
    assert plan.candidates == ()  # nothing to choose from


def test_packed_sequences_cost_what_their_samples_cost() -> None:
    """Attention stays within a sample: a sequence of two costs less than one sample as long."""
    cost = {"linear_ps": 1_000, "quadratic_fs": 1_000_000, "backward_percent": 0}
    stream = {"seq_len": 1_000, "global_batch": 1}
    data = grouped_data(2, 500, {"max_degree": 2}, cost, stream=stream, encoder=0)
    plan = plan_step(parse_job(data), 0, texts(np.array([500, 300])))
    assert plan.num_microbatches == 1
    assert plan.groups.degree.tolist() == [2]
    exchange_ps = 400_000 * 2
    forward = (250_000 + 90_000 + 800 * (1_000 + exchange_ps) // 1_000) // 2
    assert plan.candidates[0].makespan_ns == forward


def test_a_generator_gets_two_microbatches_in_flight_where_that_is_faster() -> None:
    stream = {
        "seq_len": 2_000,
        "global_batch": 32,
        "packing": {"enabled": False},
        "generation": {"ratio": "0.5"},
    }
    job = parse_job(grouped_data(8, 400, {"max_degree": 8}, stream=stream, encoder=2, generator=2))
    plan = plan_step(job, 0, make_samples(job, 32, 3, 2))
    assert "tokens of a device" in plan.candidates[0].name
    assert [plan.in_flight(m)[0] for m in ("vit", "llm", "dit")] == [3, 2, 1]
    plain = next(c for c in plan.candidates if c.name == "unequal groups by search")
    assert plan.candidates[0].makespan_ns < plain.makespan_ns * 8 // 10
    assert any(d.subject == "llm" and d.chosen == "in flight: 2" for d in plan.decisions)


@pytest.mark.parametrize("policy", ["search", "homogeneous"])
def test_more_memory_leaves_encoders_something_to_work_on_beside_the_backbone(policy: str) -> None:
    """Groups for the backbone alone would be one microbatch, and the encoder would run before it."""
    stream = {"seq_len": 600, "global_batch": 12, "packing": {"enabled": False}, "sizing": {"max_patches": 256}}
    times = []
    for units in (600, 1_000, 1_400, 2_000, 20_000):
        job = parse_job(grouped_data(4, units, {"max_degree": 4, "policy": policy}, stream=stream, encoder=1))
        plan = plan_step(job, 0, make_samples(job, 12, 1, 2))
        times.append(plan.candidates[0].makespan_ns)
    assert plan.num_microbatches > 1
    assert len(set(times)) == 1
    plain = max(c.makespan_ns for c in plan.candidates if "tokens of a device" not in c.name)
    assert 10 * times[0] < 9 * plain


def test_memory_of_an_encoder_raises_the_number_of_microbatches() -> None:
    stream = {"seq_len": 600, "global_batch": 12, "packing": {"enabled": False}, "sizing": {"max_patches": 256}}
    data = grouped_data(4, 2_000, {"max_degree": 4}, stream=stream, encoder=1)
    wide = parse_job(data)
    samples = make_samples(wide, 12, 1, 2)
    data["execution"]["modules"][0]["memory"] = {"budget_bytes": 512, "unit_bytes": 1}
    narrow = parse_job(data)
    few, several = (plan_step(job, 0, samples) for job in (wide, narrow))
    assert several.num_microbatches > few.num_microbatches
    check_groups(narrow, several)
    most = []
    for plan in (few, several):
        vit = plan.arrangement("vit")
        most.append(int(np.bincount(vit.microbatch, samples.patches[vit.item]).max()))
    assert most[1] <= 512 < most[0]


def test_a_packed_sequence_whose_images_fit_nowhere_is_unpacked() -> None:
    stream = {"seq_len": 600, "global_batch": 1, "sizing": {"max_patches": 256}}
    data = grouped_data(4, 2_000, {"max_degree": 4}, stream=stream, encoder=1)
    data["execution"]["modules"][0]["memory"] = {"budget_bytes": 256, "unit_bytes": 1}
    job = parse_job(data)
    samples = make_samples(job, 30, 1, 1)
    plan = plan_step(job, 0, samples)
    check_groups(job, plan)
    assert plan.num_microbatches >= (np.diff(samples.image_offsets) > 0).sum() // 4
    with pytest.raises(WaveTooLargeError, match=r"The wave holds one sample: dataset laion, shard 0, row \d+$"):
        plan_step(job, 0, make_samples(job, 30, 1, 3))


def test_a_sample_longer_than_the_largest_group_is_named() -> None:
    data = grouped_data(4, 100, {"max_degree": 4}, stream={"seq_len": 600}, encoder=0)
    with pytest.raises(
        SampleTooLargeError,
        match=r"dataset laion, shard 0, row 1: the sample has 401 tokens, but the largest sequence group of module llm "
        r"holds 400; raise layout.max_degree",
    ):
        plan_step(parse_job(data), 0, texts(np.array([400, 401])))


def test_what_no_groups_hold_is_said_with_the_step() -> None:
    packed = planner._packed(
        parse_job(grouped_data(4, 100, {"max_degree": 4}, encoder=0)), 3, texts(np.array([90, 300]))
    )
    with pytest.raises(JobSpecError, match=r"^step 3: sequence 0 has 90 tokens; .* holds 1 to 40 in a group of 4"):
        planner._by_policy(packed, replace(packed.costs, device_tokens=10), planner.plans_of)


@pytest.mark.parametrize(
    ("dp", "groups", "message"),
    [
        (6, {"max_degree": 4}, r"dp 6 and groups up to 4 ranks; .* lower max_degree to 2"),
        (4, {"max_degree": 8}, r"dp 4 and groups up to 8 ranks; .* lower max_degree to 4"),
        (8, {"max_degree": 6, "exchange": []}, "max_degree is 6; a power of two is required"),
        (8, {"max_degree": 8, "min_degree": 3}, "min_degree is 3; a power of two is required"),
        (8, {"max_degree": 4, "min_degree": 8}, "min_degree is 8, above max_degree 4"),
        (8, {"max_degree": 4, "exchange": []}, r"exchange has degrees \[\]; one entry for each of \[2, 4\]"),
        (256, {"max_degree": 256}, "256 devices have 692004 compositions.*use min_degree 2 or more"),
    ],
)
def test_impossible_groups_are_refused_when_the_job_is_parsed(dp: int, groups: dict[str, int], message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        parse_job(grouped_data(dp, 100, groups, encoder=0))


def test_groups_need_memory() -> None:
    data = grouped_data(4, 100, {"max_degree": 4}, encoder=0)
    del data["execution"]["modules"][0]["memory"]
    with pytest.raises(JobSpecError, match="module llm has pp 1, sp 1, padded False and no memory"):
        parse_job(data)


def test_many_ranks_with_a_larger_smallest_group() -> None:
    job = parse_job(grouped_data(1024, 300, {"min_degree": 16, "max_degree": 64}, encoder=0, stream={"seq_len": 9_000}))
    plan = plan_step(job, 0, texts(np.linspace(100, 9_000, 40).astype(np.int64)))
    check_groups(job, plan)


def test_the_bound_rounds_constants_as_plans_do() -> None:
    """An encoder whose backward is a third of its forward: no fraction of a nanosecond is added up."""
    job = parse_job(grouped_data(2, 300, {"max_degree": 2}, stream={"seq_len": 300, "packing": {"enabled": False}}))
    data = job.spec.model_dump(mode="json", exclude_none=True)
    for module in data["execution"]["modules"]:
        module["cost"] = {"microbatch_ns": 50 if module["kind"] == "encoder" else 0, "linear_ps": 0, "quadratic_fs": 0}
        module["cost"]["backward_percent"] = 33
    job = parse_job(data)
    plan = plan_step(job, 0, texts(np.full(12, 300, np.int64)))
    waves = plan.num_microbatches
    assert waves > 2
    assert bound_ns(job, plan) == waves * (50 + 16) == timeline(job.spec, plan).makespan_ns


def test_groups_leave_nothing_to_a_balancer() -> None:
    data = grouped_data(4, 200, {"max_degree": 4})
    next(m for m in data["execution"]["modules"] if m["kind"] == "backbone")["balance"] = "none"
    with pytest.raises(JobSpecError, match="module llm has balance none; groups themselves spread"):
        parse_job(data)


@pytest.mark.parametrize("terms", [(10**11, 0), (0, 10**8)])
@pytest.mark.parametrize("packed", [False, True])
def test_costs_beyond_int64_are_refused(terms: tuple[int, int], packed: bool) -> None:
    cost = {"microbatch_ns": 0, "linear_ps": terms[0], "quadratic_fs": terms[1], "backward_percent": 1000}
    stream = {"seq_len": 2**22, "global_batch": 64, "packing": {"enabled": packed}}
    data = grouped_data(64, 10**6, {"max_degree": 64}, cost, stream=stream, encoder=0)
    with pytest.raises(JobSpecError, match=r"of module llm x its backward_percent could come to .* lower the costs"):
        parse_job(data)


def test_the_budget_shrinks_with_what_there_is_to_search() -> None:
    """The published batches keep the whole budget; hundreds of microbatches on many compositions do not."""
    assert bounded_budget(3 * A100.cluster_tokens, A100) == Budget()
    spent = [bounded_budget(count * A100.cluster_tokens, A100) for count in (1, 10, 100, 1_000, 100_000)]
    looks = [(b.microbatch_counts, b.rounds * b.cuts) for b in spent]
    assert looks == sorted(looks, reverse=True)
    assert looks[-1] == (1, 0)


def test_a_small_search_is_bounded_by_what_it_looks_at() -> None:
    assert [is_quick(count * A100.cluster_tokens, A100) for count in (1, 10, 100, 1_000)] == [True, True, True, False]


def test_groups_for_less_memory_are_sought_only_while_that_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    job, tables = matrix("grouped", 29)
    samples, sought = samples_of(job, tables), list[int]()

    def sized(policy: GroupPolicy, lengths: I64, squares: I64, costs: GroupCosts) -> SequencePlan:
        sought.append(costs.device_tokens)
        return quick_plan(policy, lengths, squares, costs)

    monkeypatch.setattr(planner, "quick_plan", sized)
    planner.plan(job, 3, samples)
    assert sorted(set(sought)) == [96, 128]
    sought.clear()
    monkeypatch.setattr(planner, "is_quick", lambda _, costs: costs.device_tokens > 96)
    planner.plan(job, 3, samples)
    assert set(sought) == {128}
    monkeypatch.undo()

    def refuse(*_: object) -> SequencePlan:
        raise ValueError("costs are beyond int64")

    monkeypatch.setattr(planner, "quick_plan", refuse)
    with pytest.raises(JobSpecError, match="step 3: costs are beyond int64"):
        planner.plan(job, 3, samples)
