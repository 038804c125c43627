"""What the interpreter asks of the runners, and what it refuses, on the microbatches of a real server."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees
from sleeping_modules import Listed

from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.simulation import Operation, OperationKind
from trainclient.client import Batch
from trainclient.program.clock import Stopwatch
from trainclient.program.interpreter import Interpreter
from trainclient.program.step_programs import StepPrograms, StreamError
from trainclient.topology.process_grid import Topology

DEGREES = Degrees(1, 2, 2, 1)


@dataclass
class Recorded:
    """A runner, and its receiver, that only notes what it is asked to do."""

    calls: list[object]
    chunk: int
    receiver: "Recorded | None" = None
    taken: list[list[int]] = field(default_factory=list)
    posted: list[tuple[int, int]] = field(default_factory=list)
    """Of every receive how many calls came before it, and its microbatch."""
    sent_ns: int = 0

    def begin_step(self, taken: object = None, views: object = None) -> None:
        assert (taken is None) == (views is None)
        if taken is None:
            self.calls.append("begin")
        else:
            self.taken = [t.tolist() for t in taken]  # type: ignore[attr-defined]

    def post(self, edge: int, batch: Batch) -> None:
        assert edge >= 0
        self.posted.append((len(self.calls), batch.microbatch))

    def forward(self, operation: Operation, batch: Batch) -> None:
        assert (operation.kind, operation.chunk) == (OperationKind.FORWARD, self.chunk)
        assert operation.microbatch == batch.microbatch
        self.calls.append(operation)

    def backward(self, operation: Operation) -> None:
        assert (operation.kind, operation.chunk) == (OperationKind.BACKWARD, self.chunk)
        self.calls.append(operation)

    def exchange(self, operation: Operation) -> None:
        assert (operation.kind, operation.chunk) == (OperationKind.EXCHANGE, self.chunk)
        self.calls.append(operation)

    def end_step(self) -> None:
        self.calls.append("end")


@dataclass
class Held:
    """Parameters that note beside the runners what is asked of them."""

    calls: list[object]

    def unshard(self, chunk: int) -> None:
        self.calls.append(Operation(OperationKind.UNSHARD, 0, chunk))

    def reduce(self, chunk: int) -> None:
        self.calls.append(Operation(OperationKind.REDUCE, 0, chunk))


def views(fleet: Fleet, module: str, dataset: str = "pairs", degrees: Degrees = DEGREES) -> tuple[Case, list[Batch]]:
    """A case, and the views of rank 0 of a module."""
    case = Case("interpreter", fleet.address, fleet.job(degrees, dataset=dataset).spec.model_dump(mode="json"))
    return case, list(case.batches(module, 0))


def interpreter(case: Case, module: str, stage: int = 0) -> tuple[Interpreter, list[object], list[Recorded]]:
    """The interpreter of rank 0 of a stage, what its runners note, and the runners."""
    spec, calls = case.parsed.spec, []
    topology = Topology.of(spec)
    process = next(p for p in topology.processes if (p.modules[0].name, p.rank, p.stage) == (module, 0, stage))
    runners = [Recorded(calls, n, Recorded(calls, n)) for n in range(len(process.chunks))]
    clock, held = Stopwatch(torch.device("cpu")), Held(calls)
    made = Interpreter(spec.execution, topology, process, runners, clock, parameters=held)  # type: ignore[arg-type]
    return made, calls, runners


@pytest.mark.parametrize(
    ("degrees", "module", "stage"),
    [
        *((DEGREES, *where) for where in (("vit", 0), ("llm", 0), ("llm", 1), ("dit", 0))),
        *((Degrees(1, 1, 2, 1, chunks=2), "llm", stage) for stage in (0, 1)),
    ],
    ids=str,
)
def test_a_stage_runs_its_list_and_nothing_else(fleet: Fleet, degrees: Degrees, module: str, stage: int) -> None:
    case, batches = views(fleet, module, degrees=degrees)
    made, calls, runners = interpreter(case, module, stage)
    made.run([Listed(batches)])
    execution = case.parsed.spec.execution
    programs = layout_of(execution).programs(execution, batches[0].schedules, len(batches))
    (program,) = (p for p in programs if (p.modules[0], p.stage) == (module, stage))
    ends = len(runners)
    assert calls == ["begin"] * ends + list(program.operations) + ["end"] * ends
    assert len(program.operations) == 2 * ends * (len(batches) + 1) > 6


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_microbatch_is_let_go_when_its_last_chunk_has_run_its_forward(fleet: Fleet, chunks: int) -> None:
    case, batches = views(fleet, "llm", degrees=Degrees(1, 1, 2, 1, chunks=chunks))
    made, calls, runners = interpreter(case, "llm")
    held = [weakref.ref(batch.tensors["token_ids"]) for batch in batches]
    runners[0].end_step = lambda: calls.append([tensor() is not None for tensor in held])  # type: ignore[method-assign]
    given = len(batches)
    assert made.run([Listed(batches.pop(0) for _ in range(given))]) is not None
    assert calls[-chunks] == [True] + [False] * (given - 1)  # the first says whose step it is


def test_a_target_knows_what_its_source_has_taken(fleet: Fleet) -> None:
    """A source of 1F1B that holds h microbatches has run the backward of k - h when it sends k."""
    case, batches = views(fleet, "llm")
    held = {s.module: s.in_flight.tolist() for s in batches[0].schedules}
    for stage, source in ((0, held["vit"][0]), (1, held["llm"][0])):
        made, _, (runner,) = interpreter(case, "llm", stage)
        made.run([Listed(batches)])
        assert runner.receiver is not None
        assert runner.receiver.taken == [[max(-1, k - source) for k in range(len(batches))]]


def test_receives_are_posted_as_soon_as_their_source_may_send(fleet: Fleet) -> None:
    case, batches = views(fleet, "llm")
    held = next(s.in_flight.tolist()[0] for s in batches[0].schedules if s.module == "llm")
    made, calls, (runner,) = interpreter(case, "llm", 1)
    made.run([Listed(batches)])
    begun = [-1 if k < held else calls.index(Operation(OperationKind.BACKWARD, k - held)) for k in range(len(batches))]
    assert runner.posted == [(max(1, index + 1), k) for k, index in enumerate(begun)]


def test_a_receive_whose_view_has_not_come_keeps_nothing_waiting(fleet: Fleet) -> None:
    case, batches = views(fleet, "llm")
    made, calls, (runner,) = interpreter(case, "llm", 1)
    late = Listed(batches)
    late.ready = False
    made.run([late])
    assert [microbatch for _, microbatch in runner.posted] == [0], "of the others the forward posts it"
    assert len(calls) == 2 * len(batches) + 4


def test_what_an_interleaved_source_has_taken_is_that_of_the_chunk(fleet: Fleet) -> None:
    case, batches = views(fleet, "llm", degrees=Degrees(1, 1, 2, 1, chunks=2))
    spec = case.parsed.spec
    topology, programs = Topology.of(spec), StepPrograms.of(spec.execution, batches[0])
    for edge in topology.edges:
        stage, position = edge.source.number % edge.source.module.pp, edge.source.number // edge.source.module.pp
        (program,) = (p for p in programs.programs if (p.modules[0], p.stage) == (edge.source.module.name, stage))
        last, expected = -1, {}
        for operation in program.operations:
            if operation.chunk == position and operation.kind is OperationKind.BACKWARD:
                last = operation.microbatch
            elif operation.chunk == position and operation.kind is OperationKind.FORWARD:
                expected[operation.microbatch] = last
        assert programs.taken(edge).tolist() == [expected[k] for k in range(len(batches))]


def test_a_record_counts_what_the_rank_saw(fleet: Fleet) -> None:
    for module, dataset in (("vit", "understanding"), ("llm", "pairs"), ("dit", "generation")):
        case, batches = views(fleet, module, dataset)
        batches = [replace(batch, wait_s=0.5) for batch in batches]
        if module == "llm":  # as where documents are split
            numbered = [replace(batch.items, part=np.arange(len(batch.items))) for batch in batches]
            batches = [replace(batch, items=items) for batch, items in zip(batches, numbered, strict=True)]
        record = interpreter(case, module)[0].run([Listed(batches)])
        assert record is not None
        seen = record.seen[module]
        assert (record.step, record.num_microbatches) == (0, len(batches))
        assert (record.text_tokens, record.target_patches) == (batches[0].text_tokens, batches[0].target_patches)
        assert min(record.text_tokens, record.target_patches) > 0
        items = [batch.items for batch in batches]
        assert seen.samples == [
            sample
            for i in items
            for sample in zip(
                *(column.tolist() for column in (i.dataset, i.epoch, i.sample, i.part) if len(column)), strict=True
            )
        ]
        assert seen.num_items == len(seen.samples) == sum(len(i) for i in items)
        assert seen.num_invalid == (module != "llm")
        assert record.data_wait_s == seen.data_wait_s == 0.5 * len(batches)


def test_microbatches_that_do_not_follow_each_other_are_refused(fleet: Fleet) -> None:
    case, batches = views(fleet, "vit")

    def run(found: Iterator[Batch]) -> object:
        return interpreter(case, "vit")[0].run([Listed(found)])

    assert run(iter(())) is None
    with pytest.raises(StreamError, match="the stream ended within step 0; every step must be complete"):
        run(iter(batches[:-1]))
    with pytest.raises(StreamError, match="step 0, microbatch 2 came where step 0, microbatch 1 was due"):
        run(iter([batches[0], *batches[2:]]))
    with pytest.raises(StreamError, match="step 1, microbatch 1 came where step 0, microbatch 1 was due"):
        run(iter([batches[0], replace(batches[1], step=1)]))
    with pytest.raises(StreamError, match=r"has schedules of stages .*'llm': 2.*; the job has .*'llm': 2"):
        run(iter([replace(batches[0], schedules=batches[0].schedules[1:])]))


def test_a_job_of_other_chunks_is_refused(fleet: Fleet) -> None:
    case, _ = views(fleet, "llm")
    _, batches = views(fleet, "llm", degrees=Degrees(1, 2, 2, 1, chunks=2))
    with pytest.raises(StreamError, match=r"no program for chunks of \('llm',\) on stage 0"):
        interpreter(case, "llm")[0].run([Listed(batches)])


def test_times_are_those_of_microbatches_all_chunks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10, 13, 20, 27, 30, 31, 40, 45))
    monkeypatch.setattr("time.thread_time_ns", lambda: next(clock))
    watch, forward, backward = Stopwatch(torch.device("cpu")), OperationKind.FORWARD, OperationKind.BACKWARD
    done = [Operation(forward, 1), Operation(backward, 0), Operation(forward, 0, 1), Operation(forward, 1, 1)]
    for operation in done:
        with watch.running(operation):
            pass
    assert (watch.nanoseconds(forward, [0, 1]), watch.nanoseconds(backward, [0, 1])) == ([1, 8], [7])
    watch.begin_step()
    assert watch.nanoseconds(forward, [0, 1]) == []
