"""Colocated modules: gradients are those of one process, and what is executed is what the simulator scored."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from program.conftest import Fleet
from program.reference import reference_gradients
from program.runtime_cases import Case, Degrees, Pool
from program.test_gradients import BOUNDS, KINDS, WEIGHTS, assert_close
from program.virtual import Arriving, ThreadCollective, execute
from sleeping_modules import Listed

from dataserver.dataset import Dataset
from dataserver.jobs import JobPlanner
from dataserver.planning.job.identity import Job, identify
from dataserver.planning.layouts.colocated.transfers import phase_transfers
from dataserver.planning.layouts.interface import layout_of
from trainclient.exchange.communicators import Communicators
from trainclient.program.assembly import assemble
from trainclient.program.clock import Stopwatch
from trainclient.program.runner import LossWeights
from trainclient.topology.process_grid import Topology
from trainclient.training.models import Models


def together(ranks: int, **more: Any) -> Degrees:
    """All modules on all ranks."""
    second = {name: ranks for name in ("second_encoder", "second_generator") if more.pop(name, False)}
    return Degrees(ranks, ranks, 1, more.pop("generator", ranks), colocated=True, **second, **more)


def check_gradients(fleet: Fleet, pool: Pool, folder: Path, degrees: Degrees, **options: Any) -> None:
    ours, reference = fleet.pair_of_jobs(degrees, **options.pop("job", {}))
    case = Case("colocated", fleet.address, ours, **{**WEIGHTS, **options})
    found = pool.run([case], folder)["colocated"]
    expected = reference_gradients(replace(case, job=reference, sharding={}))
    trained = {name: g for name, g in expected.items() if name.split(".")[0] not in degrees.frozen}
    assert found.keys() == trained.keys()
    assert_close(found, trained, BOUNDS["float64"])


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "degrees",
    [
        together(1),
        together(2, second_encoder=True, second_generator=True, retained=(64, 192)),
        together(4, second_encoder=True, second_generator=True),
        together(4, retained=(64, 192)),
        together(2, second_encoder=True, frozen=("vit",), retained=(64, 0)),
        together(2, frozen=("dit",), recompute=("vit",), retained=(64, 0)),
        together(2, second_encoder=True, frozen=("vit", "llm")),
        together(2, frozen=("dit",), recompute=("vit", "llm")),
    ],
    ids=str,
)
def test_gradients_equal_the_reference(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees) -> None:
    """More than `test_covers.py` has."""
    check_gradients(fleet, pool, tmp_path, degrees)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(("zero2", "none", "zero3"), marks=pytest.mark.slow),
        pytest.param(("zero2", "zero2", "zero2"), marks=pytest.mark.long),
        pytest.param(("zero3", "zero3", "zero3"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_shares_over_all_ranks(fleet: Fleet, pool: Pool, tmp_path: Path, shares: tuple[str, ...]) -> None:
    """In rounds."""
    check_gradients(
        fleet, pool, tmp_path, together(2, retained=(64, 192)), sharding=dict(zip(KINDS, shares, strict=True))
    )


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("dataset", ["understanding", "generation", "documents"])
def test_an_image_that_cannot_be_decoded(fleet: Fleet, pool: Pool, tmp_path: Path, dataset: str) -> None:
    ours, reference = fleet.pair_of_jobs(together(2), dataset=dataset)
    case = Case("broken", fleet.address, ours, **WEIGHTS)
    expected = reference_gradients(replace(case, job=reference), {fleet.victims[dataset]}.__contains__)
    assert_close(pool.run([case], tmp_path)["broken"], expected, BOUNDS["float64"])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_without_generator(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    ours, reference = fleet.pair_of_jobs(together(2, generator=0), generation={"ratio": "0", "query_tokens": 4})
    found = pool.run([Case("text", fleet.address, ours)], tmp_path)["text"]
    expected = reference_gradients(Case("text", fleet.address, reference))
    idle = {name for name in expected if name.startswith("dit.")} | {"llm.query.weight"}
    assert_close(found, {name: g for name, g in expected.items() if name not in idle}, BOUNDS["float64"])


@pytest.mark.timeout(400)
def test_another_plan_ends_all_ranks(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    ours, _ = fleet.pair_of_jobs(together(2))
    outcomes = pool.outcomes([Case("other", fleet.address, ours, other_plan_rank=0)], tmp_path)
    errors = [line for outcome in outcomes if outcome is not None for line in outcome.splitlines()]
    assert None not in outcomes, errors
    mismatches = [line for line in errors if "BrokerMismatchError: " in line]
    assert any("this rank was sent step 0 of plan" in line for line in mismatches), errors
    assert any(f"and rank 0 step 0 of plan {'0' * 16}; all ranks must read" in line for line in mismatches), errors


HOPS = {
    "transfers": [
        {"source": "vit", "target": "llm", "latency_ns": 1_000, "bytes_per_ns": "0.01", "row_bytes": 70},
        {"source": "llm", "target": "dit", "latency_ns": 2_000, "bytes_per_ns": "1", "row_bytes": 10},
    ]
}


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        (together(3), {"global_batch": 9}),
        pytest.param(together(2), HOPS, marks=pytest.mark.long),
        (together(4, second_encoder=True, second_generator=True), HOPS),
        (together(2, generator=0), {"generation": {"ratio": "0"}, "transfers": HOPS["transfers"][:1]}),
        pytest.param(together(2, frozen=("vit",)), HOPS, marks=pytest.mark.long),
        (together(2, frozen=("vit", "llm"), second_encoder=True), HOPS),
        pytest.param(together(2, frozen=("llm",)), HOPS, marks=pytest.mark.long),
        (together(2, second_encoder=True, second_generator=True, retained=(64, 192)), HOPS),
        (
            together(2, generator=0, retained=(64, 0)),
            {"generation": {"ratio": "0"}, "transfers": HOPS["transfers"][:1]},
        ),
    ],
    ids=str,
)
def test_the_executed_step_is_the_simulated_one(fleet: Fleet, degrees: Degrees, options: dict[str, Any]) -> None:
    job = fleet.job(degrees, **options)
    datasets = tuple(Dataset.open(fleet.folders[d.name]) for d in job.stream.datasets)
    plan = JobPlanner(job, datasets).plan(0)
    planned = layout_of(job.spec.execution).timeline(job.spec, plan)
    case = Case("virtual", fleet.address, job.spec.model_dump(mode="json"))
    executed = execute(case, job, planned, phase_transfers(job.spec.execution, plan))
    listed = list(planned.pipeline.operations[0])
    for rank, found in enumerate(executed):
        assert [e.operation for e in found] == listed
        assert [e.start_ns for e in found] == planned.timeline.start_ns[rank].tolist()
        assert [e.end_ns for e in found] == planned.timeline.end_ns[rank].tolist()
    assert max(e.end_ns for found in executed for e in found) == planned.makespan_ns > 0
    rounds = plan.num_microbatches // (plan.schedules[0].drain_every or plan.num_microbatches)
    assert rounds == 1 if not any(degrees.retained) else rounds > 1


@dataclass
class Watched(ThreadCollective):
    """One rank alone, which notes when it waits for rows."""

    seen: list[str] = field(default_factory=list)

    def all_to_all(self, *args: Any) -> Arriving:
        found = super().all_to_all(*args)
        whole = found.wait
        found.wait = lambda: [self.seen.append(" to ".join(args[0])), *whole()][1:]  # type: ignore[method-assign]
        return found


def test_text_is_embedded_while_rows_are_on_their_way(fleet: Fleet) -> None:
    job = fleet.job(together(1))
    topology, case = Topology.of(job.spec), Case("one", fleet.address, job.spec.model_dump(mode="json"))
    (process,) = topology.processes
    modules = Models.of(case.config, job.spec).build(process, torch.device("cpu"))
    rank = Watched(0, 1, {(0, 0): Queue()})
    (embed,) = (m.network.get_submodule("embed") for site, m in modules if site.module.name == "llm")
    embed.register_forward_hook(lambda *_: rank.seen.append("text"))
    weights, clock = LossWeights(), Stopwatch(torch.device("cpu"))
    headers = ThreadCollective(0, 1, {(0, 0): Queue()})
    machine = assemble(
        job.spec, topology, process, modules, Communicators({}, rank, header_collective=headers), weights, clock
    )
    streams = [Listed(case.batches(m.name, 0, machine.tensors[m.name])) for m in process.modules]
    record = machine.interpreter.run(streams)
    assert record is not None
    backbone = [seen for seen in rank.seen if seen in ("text", "vit to llm")]
    texts = ["text"] * (record.num_microbatches - 1)
    assert backbone == ["text", "vit to llm", *texts, "vit to llm"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_evaluation_runs_forwards_alone(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """Its losses are those of a training step of the held-out stream with the same weights."""
    other = fleet.job(together(2), dataset="more", seed=9)

    def run(name: str, job: Job, **more: Any) -> Case:
        still = {"steps": 1, "metrics": str(tmp_path / f"{name}.jsonl"), "optimizer": {"lr": 1e-300}, **more}
        return Case(name, fleet.address, job.spec.model_dump(mode="json"), training=still)

    evaluated = run("evaluated", fleet.job(together(2)), evaluation={"every": 1, "steps": 1})
    held_out = identify(other.spec.forward_only).spec.model_dump(mode="json")
    pool.run([replace(evaluated, held_out=held_out), run("trained", other)], tmp_path)
    found, expected = (json.loads((tmp_path / f"{name}.jsonl").read_text()) for name in ("evaluated", "trained"))
    for name in ("text_loss", "image_loss"):
        assert found["evaluation"][name] == pytest.approx(expected[name], rel=1e-12)
    assert found["evaluation"]["sample_digest"] == expected["sample_digest"]
