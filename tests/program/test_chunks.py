"""What a chunk refuses to hand on, how its loss adds up, and clocks on a device that is not there."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from program.runtime_cases import Degrees
from topology.test_process_grid import layout

from dataserver.planning.simulation import Operation, OperationKind
from trainclient.exchange.message_header import Kind, MessageType
from trainclient.exchange.rows import Rows
from trainclient.exchange.wait_times import Waits
from trainclient.layouts.interface import ProcessSurroundings
from trainclient.layouts.shared.messages import edge_end
from trainclient.modules import Output, Target
from trainclient.program.assembly import Machine
from trainclient.program.clock import Executed, Stopwatch
from trainclient.program.runner import ChunkRunner, LossWeights, planned_targets
from trainclient.program.step_programs import StepPrograms, StreamError

CPU = torch.device("cpu")
BATCH: Any = SimpleNamespace(step=7, microbatch=2, text_tokens=8, target_patches=4)


def runner(sender: Any, target: Target | None = None, weights: LossWeights | None = None) -> ChunkRunner:
    stream = SimpleNamespace(seed=7, datasets=[])
    job, spec = SimpleNamespace(stream=stream), SimpleNamespace(name="vit", frozen=None, runs_backward=True)
    site: Any = SimpleNamespace(job=job, module=spec, row_width=3)
    module: Any = SimpleNamespace(device=CPU, target=target, tensors=("a", "b"))
    return ChunkRunner(site, module, None, sender, weights or LossWeights(), Stopwatch(CPU))


def rows(*shape: int) -> Rows:
    return Rows(torch.zeros(shape), torch.ones(1, dtype=torch.bool), None)


def test_rows_that_nobody_takes_are_refused() -> None:
    alone = runner(None)
    assert alone._send(BATCH, Output()) is None
    assert alone._send(BATCH, Output(rows(0, 3))) is None
    with pytest.raises(ValueError, match=r"^module vit made 1 rows in step 7, but feeds no other module; add one that"):
        alone._send(BATCH, Output(rows(1, 3)))


def test_rows_of_another_shape_than_the_next_module_takes_are_refused() -> None:
    sent = []
    feeding = runner(SimpleNamespace(send=lambda *given: sent.append(given) or "transfer"))
    behind = r"the modules behind it take rows of shape \[any, 3\]"
    with pytest.raises(ValueError, match=f"^module vit made no rows; {behind}"):
        feeding._send(BATCH, Output())
    for shape in ((3,), (2, 4), (2, 2), (1, 2, 3)):
        with pytest.raises(
            ValueError, match=rf"^module vit made rows of shape \[{str(shape)[1:-1].rstrip(',')}\]; {behind}"
        ):
            feeding._send(BATCH, Output(rows(*shape)))
    given = rows(2, 3)
    assert feeding._send(BATCH, Output(given)) == "transfer"  # type: ignore[comparison-overlap]
    assert sent == [(BATCH, given)]


def test_a_module_that_makes_a_row_too_few_is_named_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> Output:
        return Output(Rows.of_items(torch.zeros(4, 3), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2, 5])))

    given = runner(None)
    for owner, name, stand_in in ((given, "_view", id), (given, "_count", id), (given.module, "forward", short)):
        monkeypatch.setattr(owner, name, stand_in, raising=False)
    message = "^in step 7, module vit made 4 rows for 2 items that have 5 together; it must make as many as the plan"
    with pytest.raises(ValueError, match=message):
        given.forward(Operation(OperationKind.FORWARD, 2), BATCH)


def test_messages_say_which_chunk_of_a_module_made_them() -> None:
    """Those between modules need no number. Both ends of an edge expect the same."""
    topology = layout(Degrees(1, 1, 2, 1, chunks=2))
    communicators: Any = SimpleNamespace(
        edges=dict.fromkeys(map(str, topology.edges), SimpleNamespace(forward=0, backward=0))
    )
    spec: Any = None
    surroundings = ProcessSurroundings(spec, topology, topology.processes[1], communicators, Stopwatch(CPU))
    found = {}
    for edge in topology.edges:
        ends = [edge_end(surroundings, edge, direction, torch.float32) for direction in (-1, 1)]
        (found[str(edge)],) = {(end.forward.message_type, end.backward.message_type) for end in ends}
    assert list(found.values()) == [
        (MessageType(Kind.EMBEDDINGS), MessageType(Kind.EMBEDDING_GRADIENTS)),
        (MessageType(Kind.CONDITIONS), MessageType(Kind.CONDITION_GRADIENTS)),
        *((MessageType(Kind.ACTIVATIONS, chunk), MessageType(Kind.ACTIVATION_GRADIENTS, chunk)) for chunk in range(3)),
    ]


def test_a_loss_is_weighted_and_divided_by_its_targets_of_the_step() -> None:
    weights = LossWeights(text=3.0, image=5.0)
    made = Output(loss_sum=torch.tensor(2.0))
    text, image, none = (runner(None, target, weights) for target in (Target.TEXT, Target.IMAGE, None))
    assert [planned_targets(BATCH, target) for target in (Target.TEXT, Target.IMAGE)] == [8, 4]
    for _ in range(2):
        assert text._loss(BATCH, made) == torch.tensor(0.75)
    assert image._loss(BATCH, made) == torch.tensor(2.5)
    empty: Any = SimpleNamespace(text_tokens=0, target_patches=0)
    assert text._loss(empty, made) == torch.tensor(6.0)
    assert none._loss(BATCH, made) is None
    assert text._loss(BATCH, Output()) is None
    machine = Machine((text, image, none, text), SimpleNamespace())  # type: ignore[arg-type]
    assert [machine.loss_sum(target) for target in (Target.TEXT, Target.IMAGE)] == [12.0, 2.0]
    assert machine.tensors == {"vit": ("a", "b")}
    text.begin_step()
    assert machine.loss_sum(Target.TEXT) == 0.0


def test_a_chunk_that_the_step_has_no_program_for() -> None:
    module: Any = SimpleNamespace(name="llm", pp=2)

    def program(stage: int, *modules: str) -> Any:
        return SimpleNamespace(stage=stage, modules=modules)

    programs = (program(0, "vit"), program(0, "llm", "llm"), program(1, "llm", "llm"))
    found = StepPrograms(programs, 1)
    where = [found._program_of(SimpleNamespace(module=module, number=n)) for n in range(4)]  # type: ignore[arg-type]
    assert where == [(programs[1], 0), (programs[2], 0), (programs[1], 1), (programs[2], 1)]
    with pytest.raises(StreamError, match=r"^the step has no program for chunk 4 of module llm$"):
        found._program_of(SimpleNamespace(module=module, number=4))  # type: ignore[arg-type]


class Event:
    """Stands for one of CUDA's, in milliseconds."""

    def __init__(self, times: Iterator[float], waited: list["Event"]) -> None:
        self._times, self._waited, self.at = times, waited, -1.0

    def record(self) -> None:
        self.at = next(self._times)

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at

    def synchronize(self) -> None:
        self._waited.append(self)


def test_on_cuda_events_are_read_once_the_last_one_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    times, waited = iter((0.5, 0.6, 0.7, 1.0, 1.5, 2.0, 2.25, 3.0, 3.5, 3.75, 4.0, 5.0, 5.25, 6.0)), []
    monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: enable_timing and Event(times, waited))
    monkeypatch.setattr("time.perf_counter_ns", lambda: 7_000_000)
    cuda, forward, backward = torch.device("cuda"), OperationKind.FORWARD, OperationKind.BACKWARD
    waits = Waits(cuda)
    watch = Stopwatch(cuda, waits)
    watch.begin_step()
    with waits.waiting():
        pass  # before the first operation
    done = [Operation(forward, 1), Operation(backward, 1), Operation(forward, 1, 1)]
    for operation in done:
        with watch.running(operation):
            assert waited == [], "measuring waits for nothing"
            for _ in range(2 if operation.kind is backward else 0):
                with waits.waiting():
                    pass
    assert watch.nanoseconds(forward, [0, 1]) == [750_000]
    assert [event.at for event in waited] == [5.25]
    assert watch.nanoseconds(backward, [0]) == [1_000_000], "without what it waited"
    assert watch.executed() == [
        Executed(done[0], 7_500_000, 8_000_000),
        Executed(done[1], 8_500_000, 10_500_000, 1_000_000),
        Executed(done[2], 11_500_000, 11_750_000),
    ]
    assert len(waited) == 3
    watch.begin_step()
    assert watch.nanoseconds(forward, [0]) == []
    assert watch.executed() == []
