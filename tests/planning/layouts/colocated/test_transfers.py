"""Colocated steps whose rows take time between modules."""

from builders.jobs import job_data
from builders.samples import make_samples
from builders.transfers import INTO, ONWARD, expected_ns, transfer, transfers_of, with_transfers, without_transfers
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.planner import baseline_plan, plan_step, timeline
from dataserver.planning.stream.samples import StepSamples


@st.composite
def colocated_jobs(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    dp, generator = draw(st.integers(1, 6)), draw(st.booleans())
    layout = {"kind": "colocated", "ranks_per_node": draw(st.integers(1, 4)), "row_bytes": 512}
    data = job_data(
        encoder=dp,
        backbone=(dp, 1),
        generator=dp if generator else 0,
        balance=draw(st.sampled_from(["lpt", "none"])),
        stream={
            "seq_len": 900,
            "sizing": {"max_patches": 256},
            "global_batch": dp * draw(st.integers(1, 4)),
            "generation": {"ratio": "0.5" if generator else "0", "query_tokens": 16},
        },
        execution={"layout": layout},
    )
    for module in data["execution"]["modules"]:
        module["padded"] = module["kind"] != "backbone" and draw(st.booleans())
    job = with_transfers(data, *draw(transfers_of([INTO, ONWARD] if generator else [INTO])))
    return job, make_samples(job, draw(st.integers(1, 30)), draw(st.integers(0, 99)), draw(st.integers(0, 3)))


def busiest(job: Job, plan: StepPlan, ends: tuple[str, str]) -> int:
    """Most rows that one node sends or takes; one rank, if there is but one node."""
    routing = next(r for r in plan.routings if (r.source_module, r.target_module) == ends)
    dp, size = job.spec.execution.backbone.dp, job.spec.model_dump()["execution"]["layout"]["ranks_per_node"]
    size = 1 if size >= dp else size
    rows = {(kind, node): 0 for kind in "st" for node in range(dp)}
    for source, target, count in zip(routing.source_rank, routing.target_rank, routing.rows, strict=True):
        if source // size != target // size:
            rows["s", int(source) // size] += int(count)
            rows["t", int(target) // size] += int(count)
    return max(rows.values())


@settings(max_examples=60)
@given(colocated_jobs())
def test_phases_wait_for_their_hops(drawn: tuple[Job, StepSamples]) -> None:
    job, samples = drawn
    plain, bound_of = without_transfers(job), layout_of(job.spec.execution).lower_bound_ns
    for plan in (plan_step(job, 0, samples), baseline_plan(job, 0, samples)):
        transfers = [
            2 * expected_ns(t, busiest(job, plan, (t.source, t.target))) for t in job.spec.execution.transfers or ()
        ]
        makespan = timeline(job.spec, plan).makespan_ns
        assert makespan == timeline(plain.spec, plan).makespan_ns + sum(transfers)
        latencies = sum(2 * t.latency_ns for t in job.spec.execution.transfers or ())
        assert bound_of(job, plan) == bound_of(plain, plan) + latencies
        assert bound_of(job, plan) <= makespan
    plan = plan_step(job, 0, samples)
    assert timeline(job.spec, plan).makespan_ns == min(c.makespan_ns for c in plan.candidates)
    assert timeline(job.spec, plan).makespan_ns <= timeline(job.spec, plan_step(plain, 0, samples)).makespan_ns


def test_images_stay_where_moving_them_costs_more_than_it_gains() -> None:
    data = job_data(
        encoder=4, backbone=(4, 1), stream={"global_batch": 16}, execution={"layout": {"kind": "colocated"}}
    )
    chosen = []
    for bandwidth in ("1000", "0.001"):
        job = with_transfers(data, transfer(INTO, bytes_per_ns=bandwidth, row_bytes=1000))
        plan = plan_step(job, 0, make_samples(job, 32, 5, 3))
        moved = any((r.source_rank != r.target_rank).any() for r in plan.routings)
        decided = next(d for d in plan.decisions if d.subject == "vit").chosen
        chosen.append((plan.candidates[0].name, moved, decided))
    assert chosen == [
        ("balanced", True, "lpt"),
        ("images beside their sequences", False, "images beside their sequences"),
    ]


def test_colocated_alternatives_have_the_same_network() -> None:
    layout = {"kind": "colocated", "ranks_per_node": 2}
    data = job_data(encoder=4, backbone=(4, 1), stream={"global_batch": 16}, execution={"layout": layout})
    names = [
        {d.name for d in layout_of(job.spec.execution).alternatives(job).single}
        for job in (parse_job(data), with_transfers(data, transfer(INTO, 1)))
    ]
    assert names[0] - names[1] == {"assignment to ranks"}
