"""What the executor asks of a role, and what it refuses, on the microbatches of a real server."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from parallel.conftest import Fleet
from parallel.runtime_cases import Case, Degrees

from trainclient.client import Batch
from trainclient.parallel.executor import StepExecutor, StreamError
from trainclient.parallel.stopwatch import Stopwatch

DEGREES = Degrees(1, 2, 2, 1)
NAMES = ("vit", "llm", "dit")


@dataclass
class Recorded:
    """A role that only notes what it is asked to do."""

    calls: list[tuple[object, ...]] = field(default_factory=list)

    def begin_step(self) -> None:
        self.calls.append(("begin",))

    def forward(self, batch: Batch) -> None:
        self.calls.append(("forward", batch.microbatch))

    def backward(self, microbatch: int, released: int) -> None:
        self.calls.append(("backward", microbatch, released))

    def end_step(self) -> None:
        self.calls.append(("end",))


def views(fleet: Fleet, module: str, dataset: str = "pairs") -> tuple[Case, list[Batch]]:
    """A case, and the views of rank 0 of a module."""
    case = Case("executor", fleet.address, fleet.job(DEGREES, dataset=dataset).spec.model_dump(mode="json"))
    return case, list(case.batches(module, 0))


def executor(case: Case, role: Recorded, module: str, stage: int = 0) -> StepExecutor:
    execution = case.parsed.spec.execution
    before = {("vit", 0): None, ("llm", 0): ("vit", 0), ("llm", 1): ("llm", 0), ("dit", 0): ("llm", 1)}[module, stage]
    place = execution.module(module), stage
    return StepExecutor(execution, role, place, None if before is None else (execution.module(before[0]), before[1]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("module", "stage"), [("vit", 0), ("llm", 0), ("llm", 1), ("dit", 0)])
def test_a_stage_runs_its_list_and_releases_what_its_peers_have_taken(fleet: Fleet, module: str, stage: int) -> None:
    case, batches = views(fleet, module)
    role = Recorded()
    executor(case, role, module, stage).run(iter(batches))
    count = batches[0].num_microbatches
    assert count == len(batches) > 2
    assert role.calls[0] == ("begin",)
    assert role.calls[-1] == ("end",)
    work = role.calls[1:-1]
    assert [call[1] for call in work if call[0] == "forward"] == list(range(count))
    assert [call[1] for call in work if call[0] == "backward"] == list(range(count))
    held = {s.module: s.in_flight for s in batches[0].schedules}
    feeding = {"vit": held["vit"][0], "dit": held["llm"][1]}.get(module, held["llm"][0] if stage else held["vit"][0])
    forwards, most = 0, 0
    for call in work:
        if call[0] == "forward":
            forwards += 1
        else:
            assert call[2] == forwards - 1 - int(feeding)
        most = max(most, forwards - sum(c[0] == "backward" for c in work[: work.index(call) + 1]))
    assert most == int(held[module][stage])


def test_a_record_counts_what_the_rank_saw(fleet: Fleet) -> None:
    for module, dataset in (("vit", "understanding"), ("llm", "pairs"), ("dit", "generation")):
        case, batches = views(fleet, module, dataset)
        batches = [replace(batch, wait_s=0.5) for batch in batches]
        record = executor(case, Recorded(), module).run(iter(batches))
        assert record is not None
        assert (record.step, record.num_microbatches) == (0, len(batches))
        assert (record.text_tokens, record.target_patches) == (batches[0].text_tokens, batches[0].target_patches)
        assert min(record.text_tokens, record.target_patches) > 0
        items = [batch.items for batch in batches]
        assert record.samples == [
            sample
            for i in items
            for sample in zip(i.dataset.tolist(), i.pass_.tolist(), i.sample.tolist(), strict=True)
        ]
        assert record.num_items == len(record.samples) == sum(len(i) for i in items)
        assert record.num_invalid == (module != "llm")
        assert record.data_wait_s == 0.5 * len(batches)


def test_microbatches_that_do_not_follow_each_other_are_refused(fleet: Fleet) -> None:
    case, batches = views(fleet, "vit")

    def run(found: Iterator[Batch]) -> object:
        return executor(case, Recorded(), "vit").run(found)

    assert run(iter(())) is None
    with pytest.raises(StreamError, match="the stream ended within step 0; every step must be complete"):
        run(iter(batches[:-1]))
    with pytest.raises(StreamError, match="step 0, microbatch 2 came where step 0, microbatch 1 was due"):
        run(iter([batches[0], *batches[2:]]))
    with pytest.raises(StreamError, match="step 1, microbatch 1 came where step 0, microbatch 1 was due"):
        run(iter([batches[0], replace(batches[1], step=1)]))
    with pytest.raises(StreamError, match=r"has schedules of stages .*'llm': 2.*; the job has .*'llm': 2"):
        run(iter([replace(batches[0], schedules=batches[0].schedules[1:])]))


def test_laps_of_a_stopwatch_are_kept_in_order_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10, 13, 20, 27))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.lap():
            pass
    assert watch.nanoseconds() == [3, 7]
    watch.reset()
    assert watch.nanoseconds() == []
