"""Jobs whose steps would be too large, or whose times int64 could not hold, are refused; others are planned right."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from builders.contrastive import contrastive_job, two_towers
from builders.jobs import MEMORY, changed, dataset, job_data, make_job
from builders.layouts import STEPS
from builders.samples import texts
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.balancing import BinBudgetError
from dataserver.planning.job.fields import PLAN_LIMITS, ModuleSpec
from dataserver.planning.job.identity import Job, JobSpecError, parse_job
from dataserver.planning.job.limits import PlanLimitError, check_contents, most_microbatches
from dataserver.planning.layouts.colocated.rounds import _in_rounds
from dataserver.planning.layouts.shared.sequences import pack_step
from dataserver.planning.plan.expectation import item_sizes, microbatch_loads
from dataserver.planning.plan.limits import check_microbatches
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import explain, plan_step, timeline
from dataserver.planning.simulation import Pipeline
from dataserver.planning.simulation.graph import build_graph, cell_values
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import MicrobatchTooLargeError, SampleTooLargeError

Data = dict[str, Any]
LARGEST = {"microbatch_ns": 10**12, "linear_ps": 10**11, "quadratic_fs": 10**8}
"""Of a cost."""
GROWTH = 4096
"""Of samples and memory, so that steps are about as large as they get."""


def colocated(dp: int) -> Data:
    """A colocated encoder and backbone."""
    layout = {"layout": {"kind": "colocated"}}
    return job_data(stream={"global_batch": dp}, execution=layout, encoder=dp, backbone=(dp, 1))


def grouped(global_batch: int) -> Data:
    """A grouped backbone beside an encoder."""
    data = job_data(stream={"global_batch": global_batch}, execution={"layout": {"kind": "grouped", "max_degree": 1}})
    data["execution"]["modules"][1]["memory"] = MEMORY
    return data


def with_little_memory(dp: int) -> Data:
    data = job_data(stream={"global_batch": dp}, encoder=1, backbone=(dp, 1))
    data["execution"]["modules"][0]["memory"] = MEMORY
    return data


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (job_data(stream={"global_batch": 2**18}), "step_sequences is 262,144; plan_version 8 takes at most 131,072"),
        (job_data(stream={"global_batch": 2**15}), "step_microbatches is 32,768; plan_version 8 takes at most 16,384"),
        (
            job_data(stream={"global_batch": 2**11}, backbone=(2, 1024)),
            "step_operations is 4,196,352; plan_version 8 takes at most 2,097,152",
        ),
        (
            job_data(stream={"global_batch": 2**13}, execution={"microbatch": 2**12}, backbone=(2, 256)),
            "step_passes is 2,105,344; plan_version 8 takes at most 1,048,576",
        ),
        (colocated(8192), "rank_pairs is 67,108,864; plan_version 8 takes at most 16,777,216: lower dp"),
        (grouped(2**14), "group_sequences is 16,384; plan_version 8 takes at most 8,192"),
        (with_little_memory(2**15), "component_work is 1,073,741,824; plan_version 8 takes at most 134,217,728"),
    ],
)
def test_a_step_that_is_too_large_is_refused_by_the_name_of_the_limit(data: Data, problem: str) -> None:
    with pytest.raises(JobSpecError, match=problem):
        parse_job(data)


def test_every_limit_has_a_job_that_reaches_it_and_is_accepted() -> None:
    parse_job(job_data(stream={"global_batch": 2**17}, backbone=(16, 1)))
    parse_job(job_data(stream={"global_batch": 2**14}))
    parse_job(job_data(stream={"global_batch": 2**10}, backbone=(1, 1023)))
    parse_job(colocated(4096))
    parse_job(grouped(2**13))


def test_what_papers_name_is_accepted() -> None:
    parse_job(job_data(stream={"global_batch": 1250 * 64, "seq_len": 8192}, encoder=625, backbone=(1250, 6)))
    parse_job(job_data(stream={"global_batch": 64_000, "seq_len": 8192}, encoder=8, backbone=(128, 8)))
    parse_job(job_data(stream={"global_batch": 2560 * 12, "seq_len": 131_072}, encoder=320, backbone=(2560, 4)))
    parse_job(colocated(2560))
    contrastive_job(two_towers(), batch=32_768, groups=1)


def test_samples_and_images_of_a_step_are_bounded_on_average() -> None:
    limits, spec = PLAN_LIMITS[8], make_job().spec
    check_contents(spec, limits.step_samples, limits.step_images)
    with pytest.raises(PlanLimitError, match=r"step_samples is about 131,073, .* takes at most 131,072"):
        check_contents(spec, limits.step_samples + 1, 0)
    with pytest.raises(PlanLimitError, match=r"step_images is about 262,145, .* takes at most 262,144"):
        check_contents(spec, 0, limits.step_images + 1)


def test_samples_and_sequences_are_bounded_together_where_sequences_have_a_budget() -> None:
    stream = {"datasets": [dataset(documents={})], "global_batch": 64, "packing": {"max_images": 2, "max_clips": 9}}
    spec = make_job(stream=stream).spec
    check_contents(spec, 2**16, 2**13)
    check_contents(spec, 2**14, 2**18)
    with pytest.raises(PlanLimitError, match=r"131,072 samples in 4,096 sequences, .* is at most 268,435,456: lower"):
        check_contents(spec, 2**17, 2**13)
    unlimited = make_job(stream={**stream, "packing": {"enabled": True}}).spec
    check_contents(unlimited, 2**17, 2**18)


def test_a_budget_is_named_that_asks_for_more_microbatches_than_can_be_planned() -> None:
    stream = {"datasets": [dataset(documents={})], "packing": {"max_images": 2}}
    with pytest.raises(MicrobatchTooLargeError, match=r"the budget of packing \(max_images, .* raise that budget, mem"):
        check_microbatches(make_job(stream=stream).spec, 16_385)


def test_memory_does_not_ask_for_more_microbatches_than_can_be_planned() -> None:
    """Samples alone in a wave each would need 1,200 microbatches of 2 x 1,024 operations."""
    data = job_data(stream={"global_batch": 1}, encoder=0, backbone=(1, 1024))
    data["execution"]["modules"][0]["memory"] = {"budget_bytes": 512, "unit_bytes": 1}
    job = parse_job(data)
    assert most_microbatches(job.spec.execution) == 1024
    with pytest.raises(MicrobatchTooLargeError, match=r"memory asks for 1,200 microbatches .* takes at most 1,024"):
        plan_step(job, 0, texts(np.full(1200, 512)))


def test_memory_does_not_ask_for_more_microbatches_of_groups_than_can_be_planned() -> None:
    """A device holds 16 tokens."""
    data = grouped(1)
    data["execution"]["modules"][1]["memory"] = {"budget_bytes": 16, "unit_bytes": 1}
    with pytest.raises(MicrobatchTooLargeError, match=r"memory asks for 16,385 microbatches .* takes at most 16,384"):
        plan_step(parse_job(data), 0, texts(np.full(16_385, 16)))


def test_rounds_do_not_make_a_step_longer_than_can_be_planned() -> None:
    """Each has as many microbatches as the others."""
    job, samples = parse_job(colocated(1)), texts(np.full(4, 16))
    sequence, _ = pack_step(job, samples)
    with pytest.raises(MicrobatchTooLargeError, match=r"memory asks for 16,386 microbatches .* takes at most 16,384"):
        _in_rounds(job, samples, partial(pack_step, job, samples), (sequence, 16_384), 3, last=False)


@pytest.mark.parametrize("data", [grouped(64), job_data(stream={"global_batch": 64}), colocated(64)])
def test_times_beyond_int64_are_refused_with_what_to_lower(data: Data) -> None:
    """A wave of 100 days, which a cost may say, has no percentage in int64."""
    data["stream"]["seq_len"] = 2**22
    (backbone,) = (m for m in data["execution"]["modules"] if m["kind"] == "backbone")
    backbone["cost"] = {**LARGEST, "backward_percent": 1000}
    problem = r"of module llm x its backward_percent could come to .* of plan_version 8, which end at 4.612e\+18: lower"
    with pytest.raises(JobSpecError, match=problem):
        parse_job(data)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("layout", "row_bytes"), 2**50, "bytes between ranks could come to .* lower layout.row_bytes"),
        (
            ("modules", 1, "memory"),
            {"budget_bytes": 2**53 - 1, "unit_bytes": 2**52},
            "bytes of activations of module llm",
        ),
    ],
)
def test_bytes_beyond_int64_are_refused_with_what_to_lower(path: tuple[Any, ...], value: Any, problem: str) -> None:
    with pytest.raises(JobSpecError, match=problem):
        parse_job(changed(colocated(64), ("execution", *path), value))


@st.composite
def extreme(draw: st.DrawFn, kind: str) -> tuple[Job, StepSamples] | None:
    """A random step at the largest costs that are accepted, give or take a factor of two; None if none are."""
    made, samples = draw(STEPS[kind])
    data = made.spec.model_dump(mode="json", exclude_none=True)
    stream, execution = data["stream"], data["execution"]
    stream["seq_len"] = min(stream["seq_len"] * GROWTH, 2**22)
    stream["sizing"]["max_patches"] = 2**20
    shrunk = {m["name"]: {f: draw(st.sampled_from((0, 0, 10, 40))) for f in LARGEST} for m in execution["modules"]}
    percents = {m["name"]: draw(st.sampled_from((0, 99, 200, 1000))) for m in execution["modules"]}
    for module in execution["modules"]:
        for field in ("budget_bytes", "step_bytes"):
            if field in module.get("memory", {}):
                module["memory"][field] *= GROWTH
    for halvings in range(0, 64, draw(st.integers(1, 3))):
        for module in execution["modules"]:
            cost = {f: most >> min(60, halvings + shrunk[module["name"]][f]) for f, most in LARGEST.items()}
            module["cost"] = {**cost, "backward_percent": percents[module["name"]]}
        try:
            return parse_job(data), _grown(samples, stream["seq_len"])
        except JobSpecError:
            continue
    return None


def _grown(samples: StepSamples, seq_len: int) -> StepSamples:
    """The same samples, as large as they may be."""
    tokens = np.minimum(samples.tokens * GROWTH, seq_len)
    rows, columns = (np.minimum(n * 64, 1024).astype(np.int32) for n in (samples.image_rows, samples.image_columns))
    return replace(samples, tokens=tokens, image_rows=rows, image_columns=columns)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEPS)
def test_at_the_largest_costs_no_time_overflows(kind: str) -> None:
    @settings(max_examples=10, deadline=None, database=None)
    @given(extreme(kind))
    def check(made: tuple[Job, StepSamples] | None) -> None:
        if made is None:
            return
        job, samples = made
        with np.errstate(over="raise"):
            try:
                plan = plan_step(job, 0, samples)
            except (MicrobatchTooLargeError, SampleTooLargeError, BinBudgetError):  # memory
                return
            summary = explain(job, plan)
        for found in job.spec.execution.modules:
            assert microbatch_loads(found, plan).tolist() == exact_loads(found, plan)
        assert all(c.makespan_ns >= 0 for c in plan.candidates)
        for simulated in (summary.before, summary.after):
            if kind in ("pipelined", "contrastive"):  # phases are no graph, and groups are simulated as one
                assert exact_makespan(simulated.pipeline) == simulated.makespan_ns
            assert min(simulated.timeline.busy_ns.tolist()) >= 0
        assert 0 <= summary.bound_ns <= timeline(job.spec, plan).makespan_ns

    check()


def exact_loads(found: ModuleSpec, plan: StepPlan) -> list[list[int]]:
    """Forward time of every microbatch of each rank, in Python's integers."""
    cost, arrangement = found.cost, plan.arrangement(found.name)
    held: dict[tuple[int, int], list[int]] = {}
    sizes = item_sizes(found, plan.samples).tolist()
    for item, rank, microbatch in zip(
        arrangement.item.tolist(), arrangement.rank.tolist(), arrangement.microbatch.tolist(), strict=True
    ):
        size = sizes[item]
        squares = size * size // 1000 * cost.quadratic_fs // 1000 + size * size % 1000 * cost.quadratic_fs // 10**6
        held.setdefault((rank, microbatch), []).append(size * cost.linear_ps // 1000 + squares)

    def load(times: list[int]) -> int:
        return cost.microbatch_ns + (len(times) * max(times, default=0) if found.padded else sum(times))

    return [[load(held.get((r, k), [])) for k in range(plan.num_microbatches)] for r in range(found.dp)]


def exact_makespan(pipeline: Pipeline) -> int:
    """The latest end of any operation, in Python's integers."""
    graph = build_graph(pipeline)
    times = cell_values(pipeline, pipeline.forward_ns, pipeline.backward_ns, pipeline.interaction_ns)
    spread, ends = graph.spread(times).tolist(), dict[int, int]()
    waits, start = graph.waits.tolist(), [0] * len(graph.waits)
    ready = [i for i, left in enumerate(waits) if left == 0]
    while ready:
        i = ready.pop()
        assert spread[i] >= 0
        ends[i] = start[i] + spread[i]
        for other, delay in _after(graph, i):
            start[other] = max(start[other], ends[i] + delay)
            waits[other] -= 1
            if waits[other] == 0:
                ready.append(other)
    return max(ends.values(), default=0)


def _after(graph: Any, i: int) -> Iterator[tuple[int, int]]:
    first, last = graph.offsets[i], graph.offsets[i + 1]
    yield from zip(graph.after[first:last].tolist(), graph.delay_ns[first:last].tolist(), strict=True)
    if graph.follows[i]:
        yield i + 1, 0
