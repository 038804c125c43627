"""Every moment of a process counts once."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from builders.jobs import make_job

from dataserver.planning.simulation import Operation, OperationKind
from trainclient.program.clock import Executed
from trainclient.program.interpreter import Span
from trainclient.program.runner import Work
from trainclient.run_times.gathering import gather
from trainclient.run_times.spent import Part, ProcessTimes, RunTimes, sources
from trainclient.topology.process_grid import Topology

KINDS = (OperationKind.UNSHARD, OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.REDUCE)


class Now:
    """A clock that stands until it is told."""

    def __init__(self) -> None:
        self.ns = 0

    def pass_by(self, ns: int) -> None:
        self.ns += ns


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    found = Now()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: found.ns)
    return found


def times_of(name: str) -> RunTimes:
    topology = Topology.of(make_job(encoder=1, backbone=(1, 2), generator=1).spec)
    process = next(p for p in topology.processes if str(p) == name)
    times = RunTimes(topology, process)
    times.own.parts.clear()  # of the process that runs the tests
    return times


def step(times: RunTimes, now: Now, wait_ratio: float = 0.25) -> None:
    """Of 100 ns: gathers 10, waits 8 for data and 12 for rows, computes 15, waits 5, computes 10, sums 20."""
    begin = now.ns
    ends = ((0, 10, 10), (30, 45, 45), (50, 60, 60), (60, 80, 80))
    operations = [Operation(kind, 0) for kind in KINDS]
    spans = [
        Span(o, begin, begin + done, 8 if o.kind is OperationKind.FORWARD else 0)
        for o, (_, _, done) in zip(operations, ends, strict=True)
    ]
    for span, (start, _, _) in zip(spans, ends, strict=True):
        object.__setattr__(span, "sent_ns", begin + start)
    executed = [Executed(o, begin + a, begin + b) for o, (a, b, _) in zip(operations, ends, strict=True)]
    clock: Any = SimpleNamespace(executed=lambda: executed)
    machine: Any = SimpleNamespace(runners=[SimpleNamespace(work=Work(tokens=7, flops=11))])
    totals: Any = SimpleNamespace(wait_ratio=wait_ratio, seconds=2.0)
    record: Any = SimpleNamespace(spans=spans)
    now.pass_by(100)
    times.step(record, clock, machine, totals)
    now.pass_by(3)
    times.end_step()


def test_the_first_step_is_part_of_the_start_and_all_else_is_told_apart(now: Now) -> None:
    times = times_of("llm rank 0 stage 0")
    now.pass_by(1000)
    times.until_now(Part.UPDATE)
    now.pass_by(50)
    times.until_now(Part.EVALUATION)
    step(times, now)
    assert times.own.parts == {Part.START: 1103, Part.EVALUATION: 50}
    step(times, now)
    now.pass_by(40)
    times.until_now(Part.CHECKPOINTS)
    assert +times.own.parts == {
        Part.START: 1103,
        Part.EVALUATION: 50,
        Part.COLLECTIVES: 30,
        Part.DATA: 8,
        Part.COMPUTED: 25,
        Part.STEP_END: 20,
        Part.UPDATE: 3,
        Part.CHECKPOINTS: 40,
    }
    assert times.own.rows == {"vit": 12, "llm": 5}
    assert times.own.total_ns == now.ns
    assert (times.own.steps, times.own.tokens, times.own.flops) == (1, 7, 11)
    assert (list(times.waits_s), times.step_s) == ([0.5], 2.0)


def test_a_lap_has_nothing_that_is_between_steps(now: Now) -> None:
    times = times_of("vit rank 0")
    now.pass_by(10)
    times.until_now(Part.UPDATE)
    now.pass_by(500)
    times.until_now(Part.EVALUATION)
    now.pass_by(7)
    assert times.lap_s() == pytest.approx(17e-9)
    now.pass_by(2)
    assert times.lap_s() == pytest.approx(2e-9)


def test_waits_are_for_the_modules_at_the_other_ends() -> None:
    topology = Topology.of(make_job(encoder=2, backbone=(1, 2), generator=1).spec)
    found = {str(p): sources(topology, p) for p in topology.processes}
    forward, backward = (OperationKind.FORWARD, 0), (OperationKind.BACKWARD, 0)
    assert {name: (of[forward], of[backward]) for name, of in found.items()} == {
        "vit rank 0": ("", "llm"),
        "vit rank 1": ("", "llm"),
        "llm rank 0 stage 0": ("vit", "llm"),
        "llm rank 0 stage 1": ("llm", "dit"),
        "dit rank 0": ("llm", ""),
    }


def test_all_times_come_to_the_first_process() -> None:
    store = dist.HashStore()
    several = [ProcessTimes(f"m rank {rank}", "m" * (1 + rank), 0, "host") for rank in range(3)]
    for rank, own in enumerate(several):
        own.parts[Part.COMPUTED] += rank
        own.rows["vit"] += 5

    def process(rank: int) -> list[ProcessTimes]:
        group = dist.ProcessGroupGloo(store, rank, len(several))
        groups: Any = SimpleNamespace(rank=rank, control=group)
        return gather(several[rank], groups)

    with ThreadPoolExecutor(len(several)) as threads:
        first, *others = threads.map(process, range(len(several)))
    assert first == several
    assert others == [[], []]
    assert ProcessTimes.of(json.loads(json.dumps(several[1].as_dict()))) == several[1]
