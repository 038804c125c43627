"""What the trainer executes is what the simulator scored, to the nanosecond."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees
from program.virtual import assert_as_simulated, execute
from program.virtual_clock import PlannedTimes, VirtualClock

from dataserver.dataset import Dataset
from dataserver.jobs import JobPlanner
from dataserver.planning.job.fields import BalancePolicy, OrderPolicy
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.simulation import Operation, OperationKind
from trainclient.program.clock import Executed
from trainclient.topology.process_grid import Topology

DEGREES = Degrees(2, 2, 2, 1)
TRANSFERS = {
    "transfers": [
        {"source": "vit", "target": "llm", "latency_ns": 1_000, "bytes_per_ns": "0.01", "row_bytes": 70},
        {"source": "llm", "target": "llm", "latency_ns": 30_000, "bytes_per_ns": "0.3", "row_bytes": 90},
        {"source": "llm", "target": "dit", "latency_ns": 2_000, "bytes_per_ns": "1", "row_bytes": 10},
    ]
}
CASES: dict[str, tuple[Degrees, dict[str, Any]]] = {
    "1f1b": (DEGREES, {}),
    "extra": (DEGREES, {"extra_in_flight": 2}),
    "gpipe": (DEGREES, {"layout": {"schedule": "gpipe"}}),
    "interleaved": (Degrees(2, 1, 2, 1, chunks=2), {}),
    "one stage of three chunks": (Degrees(1, 2, 1, 1, chunks=3), {}),
    "transfers": (DEGREES, TRANSFERS),
    "interleaved transfers": (Degrees(1, 1, 2, 1, chunks=2), TRANSFERS),
    "several": (Degrees(2, 2, 2, 1, second_encoder=1, second_generator=2), {}),
    "several interleaved": (Degrees(1, 2, 2, 1, chunks=2, second_encoder=2), {}),
    "no encoder": (Degrees(0, 2, 3, 1), {"generation": {"ratio": "1", "query_tokens": 4}}),
    "no generator": (Degrees(1, 2, 2, 0), {"generation": {"ratio": "0"}}),
    "two sequences": (DEGREES, {"microbatch": 2}),
    "encoder frozen": (Degrees(2, 2, 2, 1, frozen=("vit",)), TRANSFERS),
    "backbone frozen": (Degrees(2, 2, 2, 1, frozen=("llm",)), TRANSFERS),
    "encoder and backbone frozen": (Degrees(2, 2, 2, 1, frozen=("vit", "llm")), TRANSFERS),
    "generator frozen": (Degrees(2, 2, 2, 1, frozen=("dit",)), {**TRANSFERS, "extra_in_flight": 2}),
    "one of two encoders frozen": (Degrees(2, 1, 2, 1, second_encoder=1, frozen=("vit_more", "dit")), TRANSFERS),
    "all but a generator frozen, interleaved": (Degrees(1, 1, 2, 1, chunks=2, frozen=("vit", "llm")), TRANSFERS),
    "encoder frozen, interleaved": (Degrees(1, 1, 2, 1, chunks=2, frozen=("vit",)), TRANSFERS),
    "all frozen": (Degrees(2, 2, 2, 1, frozen=("vit", "llm", "dit")), TRANSFERS),
    "all frozen, interleaved": (Degrees(2, 1, 2, 1, chunks=2, frozen=("vit", "llm", "dit")), TRANSFERS),
    "computed again": (Degrees(2, 2, 2, 1, frozen=("dit",), recompute=("vit", "dit")), TRANSFERS),
    "tp": (Degrees(1, 2, 2, 1, tp=(2, 2, 1)), TRANSFERS),
    "tp, interleaved": (Degrees(1, 1, 2, 1, chunks=2, tp=(1, 2, 2)), TRANSFERS),
    "shared sequences": (Degrees(2, 2, 2, 1, sp=2), TRANSFERS),
    "shared sequences, tp, interleaved": (Degrees(1, 1, 2, 1, chunks=2, tp=(1, 2, 1), sp=2), TRANSFERS),
    "no packing": (DEGREES, {"packing": {"enabled": False}}),
    **{f"order {order}": (DEGREES, {"layout": {"order": str(order)}}) for order in OrderPolicy},
}


def check(
    fleet: Fleet, degrees: Degrees, options: dict[str, Any]
) -> tuple[Topology, PlannedTimes, list[list[Executed]]]:
    """Step 0 of a job, executed by threads on virtual clocks: who did what was planned, and when."""
    job = fleet.job(degrees, **options)
    datasets = tuple(Dataset.open(fleet.folders[d.name]) for d in job.stream.datasets)
    plan = JobPlanner(job, datasets).plan(0)
    planned = layout_of(job.spec.execution).timeline(job.spec, plan)
    case = Case("virtual", fleet.address, job.spec.model_dump(mode="json"))
    assert next(case.batches("llm", 0)).plan_hash == plan.hash
    executed = execute(case, job, planned)
    assert_as_simulated(job, planned, executed)
    topology = Topology.of(job.spec)
    return topology, PlannedTimes(planned, topology), executed


FEW = (
    *("1f1b", "gpipe", "interleaved", "one stage of three chunks", "transfers", "interleaved transfers", "several"),
    *("no encoder", "encoder and backbone frozen", "all frozen, interleaved", "computed again", "no packing"),
    *("shared sequences, tp, interleaved", *(f"order {order}" for order in OrderPolicy)),
)
"""For continuous integration."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.long) for n in CASES])
def test_the_executed_step_is_the_simulated_one(fleet: Fleet, name: str) -> None:
    check(fleet, *CASES[name])


def test_rows_move_while_something_else_is_computed(fleet: Fleet) -> None:
    """Of a stage that waits for nothing but rows: it begins when they are there, however long they took to come."""
    topology, times, executed = check(fleet, *CASES["transfers"])
    source, target = next(topology.pairs(edge)[0] for edge in topology.edges if edge.is_straight)
    done = {e.operation: e.end_ns for e in executed[source]}
    under_way = 0
    for before, now in pairwise(executed[target]):
        if now.operation.kind is OperationKind.FORWARD:
            sent, takes = done[now.operation], times.transfer_ns(source, target, now.operation.microbatch)
            assert now.start_ns == max(before.end_ns, sent + takes)
            under_way += sent < before.end_ns and before.start_ns < sent + takes
    assert under_way > 0


SCHEDULES = ("1f1b", "gpipe", "interleaved")
BALANCES = [str(balance) for balance in BalancePolicy if balance is not BalancePolicy.EVEN]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balance", "schedule"),
    [
        pytest.param(
            balance, schedule, marks=[] if number % len(SCHEDULES) == SCHEDULES.index(schedule) else pytest.mark.long
        )
        for number, balance in enumerate(BALANCES)
        for schedule in SCHEDULES
    ],
)
def test_with_every_balance_and_schedule(fleet: Fleet, balance: str, schedule: str) -> None:
    degrees = Degrees(2, 1, 2, 1, chunks=2) if schedule == "interleaved" else DEGREES
    layout = {} if schedule == "interleaved" else {"layout": {"schedule": schedule}}
    check(fleet, degrees, {**TRANSFERS, **layout, "balance": balance})


class NotedClock(VirtualClock):
    """Notes where phases begin, and what runs in them."""

    def __init__(self, modules: Sequence[str]) -> None:
        process: Any = SimpleNamespace(chunks=[SimpleNamespace(module=SimpleNamespace(name=name)) for name in modules])
        times: Any = SimpleNamespace(lockstep_ranks=(), operation_ns=lambda *_: 1)
        super().__init__(times, 0, process)
        self.noted: list[int | str] = []

    def _barrier(self) -> None:
        self.noted.append("phase")

    def run(self, chunks: Sequence[int]) -> list[int | str]:
        self.begin_step()
        self.noted.clear()
        for chunk in chunks:
            with self.running(Operation(OperationKind.FORWARD, 0, chunk)):
                self.noted.append(chunk)
        return self.noted


def test_a_phase_begins_with_another_module_also_behind_a_single_operation() -> None:
    clock = NotedClock(("vit", "llm", "dit"))
    assert clock.run([0, 0, 1, 2, 2, 1, 0]) == [0, 0, "phase", 1, "phase", 2, 2, "phase", 1, "phase", 0]
    assert clock.run([0]) == [0], "a step begins with no phase before it"
    assert NotedClock(("llm", "llm")).run([0, 1, 0]) == [0, 1, 0], "chunks of one module are no phases"
