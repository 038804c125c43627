"""Rows that take time between modules and between stages: in jobs, the simulator and the bounds."""

from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from math import ceil
from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data
from builders.samples import make_samples
from builders.transfers import (
    INTO,
    ONWARD,
    STAGES,
    alike_data,
    expected_ns,
    one_image_each,
    transfer,
    transfers_of,
    with_transfers,
    without_transfers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.simulation.reference import fixed_point

from dataserver.planning.costs.model import transfer_ns
from dataserver.planning.job.fields import OrderPolicy, Transfer
from dataserver.planning.job.identity import Job, JobSpecError, canonical_json, parse_job
from dataserver.planning.layouts.grouped.wave_order import chain, searched_order
from dataserver.planning.layouts.interface import PlannedTimeline, layout_of
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import baseline_plan, plan_step, timeline
from dataserver.planning.simulation import OrderScorer, Pipeline, simulate
from dataserver.planning.stream.samples import StepSamples
from dataserver.planning.stream.sizing import shard_table, size_samples

TWO_STAGES = job_data(backbone=(1, 2), generator=1, stream={"generation": {"ratio": "0.5"}})


def test_a_job_without_transfers_has_the_identity_that_it_had() -> None:
    plain, timed = parse_job(TWO_STAGES), with_transfers(TWO_STAGES, transfer(INTO, 5))
    assert b"transfers" not in canonical_json(plain.spec)
    assert plain.stream_id == timed.stream_id
    assert plain.job_id != timed.job_id
    spelled = [with_transfers(TWO_STAGES, transfer(INTO, bytes_per_ns=b)).job_id for b in ("50", "50.00", "050")]
    assert len(set(spelled)) == 1


@pytest.mark.parametrize(
    ("transfers", "message"),
    [
        ([transfer(("vit", "none"))], "module 'none' is not in the job"),
        (
            [transfer(("llm", "vit"))],
            "the transfer from llm to vit moves nothing; there are vit to llm, llm to dit, llm",
        ),
        ([transfer(("vit", "vit"))], "the transfer from vit to vit moves nothing"),
        ([transfer(INTO), transfer(INTO)], "the transfer from vit to llm is there 2 times; name each pair once"),
        ([transfer(INTO, bytes_per_ns="0")], "the transfer from vit to llm has bytes_per_ns 0; from 0.001 to 1000000"),
        ([transfer(INTO, bytes_per_ns=[50])], "transfers.0.bytes_per_ns: "),
        ([transfer(INTO, bytes_per_ns="0.0005")], "has bytes_per_ns 0.0005; from 0.001"),
        ([transfer(INTO, bytes_per_ns="1000001")], "has bytes_per_ns 1000001"),
        ([transfer(INTO, latency_ns=-1)], "transfers.0.latency_ns: found -1; it should be greater than or equal to 0"),
        ([], "at least 1 item"),
    ],
)
def test_transfers_that_are_refused(transfers: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(JobSpecError) as error:
        with_transfers(TWO_STAGES, *transfers)
    assert message in str(error.value)


def test_layouts_without_stages_have_no_hops_between_them() -> None:
    colocated = job_data(encoder=2, backbone=(2, 1), execution={"layout": {"kind": "colocated"}})
    for data in (job_data(), colocated):
        with pytest.raises(JobSpecError, match="the transfer from llm to llm moves nothing; there are vit to llm"):
            with_transfers(data, transfer(STAGES))


@given(
    st.integers(0, 10**12),
    st.integers(0, 2**24),
    st.integers(1, 10**9),
    st.lists(st.integers(0, 2**29), min_size=1, max_size=5),
)
def test_hops_are_rounded_up_and_never_overflow(latency: int, row_bytes: int, bandwidth: int, rows: list[int]) -> None:
    text = f"{bandwidth // 1000}.{bandwidth % 1000:03}"
    found = Transfer(source="a", target="b", latency_ns=latency, bytes_per_ns=text, row_bytes=row_bytes)
    assert transfer_ns(found, np.array(rows)).tolist() == [expected_ns(found, n) for n in rows]


@st.composite
def wave_jobs(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """Pipelined or grouped, with transfers."""
    kind = draw(st.sampled_from(["pipelined", "grouped"]))
    generator, dp, pp = draw(st.integers(0, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layout: dict[str, Any] = {"kind": kind, "order": draw(st.sampled_from(["search", "disttrain", "none"]))}
    backbone: dict[str, Any] = {}
    if kind == "grouped":
        dp, pp = 4, 1
        layout |= {"max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 400_000}]}
        backbone = {"memory": {"budget_bytes": 50_000, "unit_bytes": 100}}
    else:
        layout["schedule"] = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
        if layout["schedule"] == "interleaved":
            layout["chunks"] = 2
        backbone = {"padded": draw(st.booleans())}
    stream = {
        "seq_len": 900,
        "sizing": {"max_patches": 256},
        "global_batch": dp * draw(st.integers(1, 4)),
        "packing": {"enabled": not backbone.get("padded") and draw(st.booleans())},
        "generation": {"ratio": "0.5" if generator else "0", "query_tokens": 16},
    }
    data = job_data(
        encoder=draw(st.integers(1, 3)),
        backbone=(dp, pp),
        generator=generator,
        stream=stream,
        execution={"layout": layout},
    )
    data["execution"]["modules"][1] |= backbone
    pairs = [INTO, *([STAGES] if pp > 1 else []), *([ONWARD] if generator else [])]
    job = with_transfers(data, *draw(transfers_of(pairs)))
    count = draw(st.integers(1, stream["global_batch"]))
    return job, make_samples(job, count, draw(st.integers(0, 99)), draw(st.integers(0, 3)))


@st.composite
def tower_jobs(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """Two towers, the first with stages, with transfers between them."""
    dp, microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    batch = 2 * dp * microbatches
    data = job_data(
        stream={
            "global_batch": 2 * batch,
            "contrastive_batch": batch,
            "packing": {"enabled": False},
            "sizing": {"max_patches": 256},
        },
        execution={"layout": {"kind": "contrastive", "microbatches": microbatches, "interaction_ns": 1000}},
    )
    data["execution"]["modules"] = [
        {"name": "image", "kind": "tower", "modality": "image", "dp": dp, "pp": draw(st.integers(2, 3))},
        {"name": "text", "kind": "tower", "modality": "text", "pp": 2, "padded": draw(st.booleans())},
    ]
    job = with_transfers(data, *draw(transfers_of([("image", "image"), ("text", "text")])))
    rng, count = np.random.default_rng(draw(st.integers(0, 99))), 2 * batch
    sides = rng.integers(16, 600, (2, count)).astype(np.int32)
    table = shard_table(job.stream, np.arange(count), rng.integers(1, 300, count), np.arange(count + 1), *sides)
    return job, size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)


def held_rows(job: Job, plan: StepPlan, module: str, rank: int, microbatch: int) -> int:
    """Tokens or patches of a rank's microbatch, padding included."""
    spec, found = job.spec.execution.module(module), plan.arrangement(module)
    sizes = plan.samples.tokens if spec.holds_samples else plan.samples.patches
    mine = sizes[found.item[(found.rank == rank) & (found.microbatch == microbatch)]].tolist()
    return len(mine) * max(mine, default=0) if spec.padded else sum(mine)


def moved_rows(plan: StepPlan, ends: tuple[str, str], microbatch: int, ranks: tuple[int, int]) -> int:
    """Rows from one rank to another; a rank of a group takes its even share."""
    routing = next(r for r in plan.routings if (r.source_module, r.target_module) == ends)
    holders = [plan.groups.holder(module, rank, microbatch) for module, rank in zip(ends, ranks, strict=True)]
    here = (routing.source_rank == holders[0]) & (routing.target_rank == holders[1])
    share = 1
    if plan.groups.module:
        of, where = plan.groups, plan.groups.of(microbatch)
        group = holders[ends.index(of.module)]
        share = int(of.degree[where][of.first_rank[where] == group][0])
    return ceil(Fraction(int(routing.rows[here & (routing.source_microbatch == microbatch)].sum()), share))


def check_edges(job: Job, plan: StepPlan, planned: PlannedTimeline) -> None:
    """Every edge takes what its definition says."""
    pipeline = planned.pipeline
    assert pipeline.transfer_ns is not None
    for (microbatch, *blocks), found in zip(pipeline.edges.tolist(), pipeline.transfer_ns.tolist(), strict=True):
        ends = [planned.nodes[b // pipeline.num_chunks] for b in blocks]
        source, target = (e.modules[0] for e in ends)
        if source == target:
            rows = held_rows(job, plan, source, ends[0].rank, microbatch)
        else:
            rows = moved_rows(plan, (source, target), microbatch, (ends[0].rank, ends[1].rank))
        assert found == expected_ns(job.spec.execution.transfer(source, target), rows)


@settings(max_examples=60)
@given(st.one_of(wave_jobs(), tower_jobs()))
def test_plans_against_definitions_and_bounds(drawn: tuple[Job, StepSamples]) -> None:
    job, samples = drawn
    bound_of = layout_of(job.spec.execution).lower_bound_ns
    for plan in (plan_step(job, 0, samples), baseline_plan(job, 0, samples)):
        planned = timeline(job.spec, plan)
        check_edges(job, plan, planned)
        if not plan.groups.module:  # a grouped backbone passes as one node, see below
            assert planned.makespan_ns == max(end for _, end in fixed_point(planned.pipeline).values())
        assert timeline(without_transfers(job).spec, plan).makespan_ns <= planned.makespan_ns
        assert bound_of(without_transfers(job), plan) <= bound_of(job, plan) <= planned.makespan_ns
    found = plan_step(job, 0, samples)
    assert all(found.candidates[0].makespan_ns <= c.makespan_ns for c in found.candidates)
    if found.candidates:
        assert timeline(job.spec, found).makespan_ns == found.candidates[0].makespan_ns


@settings(max_examples=30)
@given(wave_jobs().filter(lambda drawn: drawn[0].spec.execution.layout.kind == "grouped"))
def test_groups_wait_for_the_slowest_hop_of_all_their_ranks(drawn: tuple[Job, StepSamples]) -> None:
    """The same step with one node for the backbone, joined as the slowest rank is."""
    job, samples = drawn
    planned = timeline(job.spec, plan_step(job, 0, samples))
    pipeline, of = planned.pipeline, [n.modules[0] for n in planned.nodes]
    assert pipeline.transfer_ns is not None
    nodes = [k for k, name in enumerate(of) if name != "llm"] + [of.index("llm")]
    number = [nodes.index(k) if name != "llm" else len(nodes) - 1 for k, name in enumerate(of)]
    slowest: dict[tuple[int, int, int], int] = {}
    for (microbatch, source, target), delay in zip(pipeline.edges.tolist(), pipeline.transfer_ns.tolist(), strict=True):
        key = microbatch, number[source], number[target]
        slowest[key] = max(delay, slowest.get(key, 0))
    forward, backward = (
        np.array([t[[n == k for n in number]].max(axis=0) for k in range(len(nodes))])
        for t in (pipeline.forward_ns, pipeline.backward_ns)
    )
    joined = replace(
        pipeline,
        stage=pipeline.stage[nodes],
        forward_ns=forward,
        backward_ns=backward,
        edges=np.array(list(slowest), np.int64).reshape(-1, 3),
        transfer_ns=np.array(list(slowest.values()), np.int64),
        activation_bytes=None,
    )
    assert planned.makespan_ns == max(end for _, end in fixed_point(joined).values())


def test_orders_are_scored_with_hops() -> None:
    """In a chain of single nodes; brute force over all orders of five microbatches."""
    random = np.random.default_rng(5)
    stages = [(f, 2 * f) for f in random.integers(1, 50, (3, 5))]
    transfers = np.array([30, 7])
    times = {}
    for each in (None, transfers):
        pipelines = [
            chain([(f[list(order)], b[list(order)]) for f, b in stages], np.array([3, 2, 1]), each)
            for order in permutations(range(5))
        ]
        expected = [max(end for _, end in fixed_point(p).values()) for p in pipelines]
        orders = np.array(list(permutations(range(5))))
        scorer = OrderScorer.of(pipelines[0])
        assert scorer.makespans(orders).tolist() == expected
        times[each is None] = expected
        assert expected[orders.tolist().index(searched_order(pipelines[0]))] <= 1.1 * min(expected)
    assert all(with_hops > without for with_hops, without in zip(times[False], times[True], strict=True))


def test_a_grouped_plan_is_ordered_with_its_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What orders are searched for is the plan itself where every module is a node and transfers depend on no rows."""
    layout = {"kind": "grouped", "min_degree": 2, "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 0}]}
    data = alike_data(2, 1, generates=False, **layout)
    data["stream"]["global_batch"] = 6
    data["execution"]["modules"][1]["memory"] = {"budget_bytes": 100, "unit_bytes": 1}
    job = with_transfers(data, transfer(INTO, 10_000))
    asked = list[Pipeline]()

    def recorded(pipeline: Pipeline) -> list[int]:
        asked.append(pipeline)
        return list(range(pipeline.forward_ns.shape[1]))

    orders = {OrderPolicy.SEARCH: (recorded, "recorded")}
    monkeypatch.setattr("dataserver.planning.layouts.grouped.refining._ORDERS", orders)
    plan = plan_step(job, 0, one_image_each(job, 6))
    assert plan.num_microbatches > 1
    makespan = timeline(job.spec, plan).makespan_ns
    assert makespan in {simulate(p).makespan_ns for p in asked}
    assert makespan > timeline(without_transfers(job).spec, plan).makespan_ns


@pytest.mark.parametrize("generates", [False, True])
def test_groups_take_their_bound(generates: bool) -> None:
    """An encoder that takes no time, or a generator beside which the backbone takes little."""
    layout = {"kind": "grouped", "min_degree": 2, "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 0}]}
    data = alike_data(2, 1, generates=generates, cost=10**9 if generates else 0, **layout)
    data["execution"]["modules"][0 if generates else 1]["memory"] = {"budget_bytes": 1000, "unit_bytes": 1}
    job = with_transfers(data, transfer(ONWARD if generates else INTO, 10_000, "0.5", 3))
    plan = plan_step(job, 0, one_image_each(job, 1))
    planned, bound = timeline(job.spec, plan), layout_of(job.spec.execution).lower_bound_ns(job, plan)
    backbone = [n.modules == ("llm",) for n in planned.nodes].index(True)
    left_out = int(planned.timeline.busy_ns[backbone]) if generates else 0
    assert bound == planned.makespan_ns - left_out
    assert bound > layout_of(job.spec.execution).lower_bound_ns(without_transfers(job), plan)


def test_a_tower_of_one_microbatch_takes_its_bound() -> None:
    """There and back through all stages, but for the rounding of their times."""
    towers = [{"name": m, "kind": "tower", "modality": m, "pp": pp} for m, pp in (("image", 3), ("text", 1))]
    stream = {"global_batch": 2, "contrastive_batch": 2, "packing": {"enabled": False}}
    data = job_data(stream=stream, execution={"modules": towers, "layout": {"kind": "contrastive"}})
    job = with_transfers(data, transfer(("image", "image"), 10**6, "0.5", 3))
    plan = plan_step(job, 0, one_image_each(job, 2))
    makespan, bound_of = timeline(job.spec, plan).makespan_ns, layout_of(job.spec.execution).lower_bound_ns
    assert makespan - 5 <= bound_of(job, plan) <= makespan
    assert bound_of(job, plan) - bound_of(without_transfers(job), plan) > 4 * 10**6
