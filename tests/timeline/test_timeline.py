"""Where a step was lost, from a plan and measurements whose losses are known."""

import io
import re

import numpy as np
import pytest
from builders.jobs import make_job
from builders.samples import make_samples

from dataserver.planning.job.identity import Job
from dataserver.planning.plan.naming import sample_name
from dataserver.planning.planner import explain, plan_step
from dataserver.planning.simulation import Operation, OperationKind
from dataserver.serving.plan_message import plan_message
from trainclient.program.clock import Executed
from trainclient.program.interpreter import Span
from trainclient.timeline.recorded import Recorded
from trainclient.timeline.time_breakdown import time_breakdowns, write_report
from trainclient.timeline.trace import trace_events
from trainclient.timeline.tracks import MicrobatchSamples, Track, tracks_of
from trainclient.topology.process_grid import Topology

FORWARD = Operation(OperationKind.FORWARD, 0)
BACKWARD = Operation(OperationKind.BACKWARD, 0)


def measured(*rows: tuple[int, ...]) -> Recorded:
    """Of start, end, done, data, when the rows had been sent, by default at the start, and waits within."""
    return Recorded(*np.array([(*row, *(row[0], 0)[len(row) - 4 :]) for row in rows], np.int64).T)


def track(name: str, found: Recorded) -> Track:
    return Track(name, (name,), 0, (FORWARD, BACKWARD), np.array([0, 50]), np.array([20, 90]), found)


@pytest.fixture
def job() -> Job:
    fields = {"stream": {"seq_len": 4096, "global_batch": 8, "generation": {"ratio": "0.5", "query_tokens": 4}}}
    return make_job(encoder=2, backbone=(2, 2), generator=1, **fields)


def test_spans_and_clock_become_times_from_the_begin_of_the_step() -> None:
    spans = [Span(FORWARD, 1000, 1050, 7, sent_ns=900), Span(BACKWARD, 1050, 1100, 0, sent_ns=1054)]
    found = Recorded.of(spans, [Executed(FORWARD, 1020, 1040), Executed(BACKWARD, 1060, 1090, 8)], 990)
    assert found.start_ns.tolist() == [30, 70]
    assert found.end_ns.tolist() == [50, 100]
    assert found.done_ns.tolist() == [60, 110]
    assert found.computed_ns.tolist() == [20, 22]
    assert found.data_ns.tolist() == [7, 0]
    assert found.moved_ns.tolist() == [0, 6], "stamps of an operation before say nothing"
    assert found.waited_ns.tolist() == [23, 4], "from the begin of the step, or from the end of the operation before"
    assert found.sent_ns.tolist() == [10, 10]
    busy = Recorded.of(spans, [Executed(FORWARD, 1020, 1057), Executed(BACKWARD, 1060, 1090)], 990)
    assert busy.moved_ns.tolist() == [0, 3], "of a device that still computes what the process has left"
    empty = Recorded.of([], [], 990)
    assert empty.waited_ns.tolist() == empty.sent_ns.tolist() == []


def test_the_parts_of_each_process_make_up_the_step() -> None:
    early = track("early", measured((10, 40, 45, 8), (60, 90, 95, 0)))
    late = track("late", measured((0, 20, 20, 0), (100, 140, 150, 30, 88, 6)))
    kinds = OperationKind.UNSHARD, OperationKind.FORWARD, OperationKind.EXCHANGE, OperationKind.REDUCE
    found = measured((1, 6, 6, 0), (6, 36, 37, 0), (38, 42, 43, 0), (43, 53, 53, 0))
    planned = np.array([0, 0, 20, 20]), np.array([0, 20, 20, 20])
    whole = Track("whole", ("vit",), 0, tuple(Operation(kind, 0) for kind in kinds), *planned, found)
    rows = time_breakdowns([early, late, whole])
    assert [(row.name, row.planned_ns, *row.spent) for row in rows] == [
        ("early", 60, 60, 8, 17, 0, 10, 0, 55),
        ("late", 60, 54, 30, 44, 12, 10, 0, 0),
        ("whole", 20, 30, 0, 2, 0, 6, 15, 97),
    ]
    assert late.excess_ns.tolist() == [0, -6]


def test_lanes_of_colocated_modules_name_the_module_of_an_operation() -> None:
    layout = {"kind": "colocated", "ranks_per_node": 2}
    job = make_job(encoder=2, backbone=(2, 1), generator=2, execution={"layout": layout})
    plan = plan_step(job, 0, make_samples(job, 40))
    message, topology = plan_message(job, plan, explain(job, plan), with_timelines=True), Topology.of(job.spec)
    found = []
    for rank in range(topology.world_size):
        (times,) = (t for t in message.timelines if t.rank == rank)
        start, end = np.array(times.start_ns), np.array(times.end_ns)
        found.append(Recorded(start, end, end, start * 0, start, start * 0))
    found[1].end_ns[-2] += 5_000_000_000  # behind it gradients are summed
    tracks, text = tracks_of(message, topology, found), io.StringIO()
    assert [track.holds for track in tracks] == [" + ".join(m.name for m in topology.processes[0].modules)] * 2
    assert [track.modules[o.chunk] for track in tracks for o in (track.operations[0], track.operations[-1])] == [
        *(m.name for m in (topology.processes[0].modules[0],) * 4)
    ]
    samples = MicrobatchSamples(message, topology, job.stream)
    write_report(0, tracks, samples, text)
    slowest = tracks[1].operations[-2].microbatch
    shown = next(line for line in text.getvalue().splitlines() if " of microbatch " in line)
    module = topology.processes[0].modules[0].name
    assert f"{tracks[1].name}: backward of microbatch {slowest} of {module}" in shown
    held = samples.of(module, 1, slowest)
    assert not held or held[0] in shown


def test_lanes_are_those_of_the_plan_and_the_slowest_operation_is_named_with_its_samples(job: Job) -> None:
    samples = make_samples(job, 40)
    plan = plan_step(job, 0, samples)
    summary = explain(job, plan)
    message = plan_message(job, plan, summary, with_timelines=True)
    assert not plan_message(job, plan, summary).timelines
    topology = Topology.of(job.spec)
    planned = {(tuple(t.modules), t.stage, t.rank): t for t in message.timelines}
    assert max(max(t.end_ns) for t in message.timelines) == summary.after.makespan_ns
    found = []
    for place in topology.processes:
        times = planned[(place.modules[0].name,), place.stage, place.rank]
        start, end = np.array(times.start_ns), np.array(times.end_ns)
        found.append(Recorded(start, end, end, start * 0, start, start * 0))
    slow = next(rank for rank, place in enumerate(topology.processes) if str(place) == "llm rank 1 stage 1")
    found[slow].end_ns[3] += 5_000_000_000
    found[slow].done_ns[3] += 5_000_000_000
    tracks = tracks_of(message, topology, found)
    assert [track.name for track in tracks] == [str(place) for place in topology.processes]
    programs = {(p.modules[0], p.stage): p for p in message.programs}
    for place, one in zip(topology.processes, tracks, strict=True):
        assert [o.microbatch for o in one.operations] == list(programs[one.modules[0], place.stage].microbatch)
    operation = tracks[slow].operations[3]
    held = MicrobatchSamples(message, topology, job.stream).of("llm", 1, operation.microbatch)
    arrangement = plan.arrangement("llm")
    items = arrangement.item[arrangement.of(1, operation.microbatch)]
    names = [sample_name(job.stream, samples, int(i)) for i in items]
    assert held == [name.removeprefix("dataset ").replace(",", "") for name in names]
    text = io.StringIO()
    write_report(7, tracks, MicrobatchSamples(message, topology, job.stream), text)
    first = next(line for line in text.getvalue().splitlines() if " of microbatch " in line)
    assert re.search(rf"llm rank 1 stage 1: {operation.kind} of microbatch {operation.microbatch}\b", first)
    assert held[0] in first
    assert text.getvalue().startswith("Step 7: planned ")


def test_a_trace_shows_what_an_operation_waited_for() -> None:
    events = list(
        trace_events([track("vit", measured((10_000, 40_000, 45_000, 8_000), (60_000, 90_000, 90_000, 0, 55_000)))])
    )
    bars = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert bars == [
        (0, "F 0", 0.0, 0.02),
        (0, "B 0", 0.05, 0.04),
        (1, "F 0: its microbatch", 0.0, 8.0),
        (1, "F 0: ranks", 8.0, 2.0),
        (1, "F 0", 10.0, 30.0),
        (1, "F 0: sending rows", 40.0, 5.0),
        (1, "B 0: ranks", 45.0, 10.0),
        (1, "B 0: rows", 55.0, 5.0),
        (1, "B 0", 60.0, 30.0),
    ]
