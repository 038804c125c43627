"""Devices have a queue for each communicator of a process, or the run is refused."""

import pytest
import torch
from program.runtime_cases import Degrees, job_data
from topology.test_process_grid import parsed
from torch.distributed import HashStore

from trainclient.topology.device_queues import COMPUTATION, QUEUES, VARIABLE, communicators_of, require_queues
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import process_groups
from trainclient.topology.support import TopologyError


def topology(degrees: Degrees) -> Topology:
    return Topology.of(parsed(job_data(degrees)).spec)


def test_communicators_are_those_of_all_of_ranks_and_of_both_directions() -> None:
    assert communicators_of(topology(Degrees(1, 1, 1, 1))) == [2 + 2, 2 + 4, 2 + 2]
    assert communicators_of(topology(Degrees(1, 1, 2, 1, frozen=("vit",)))) == [2 + 1, 2 + 1 + 2, 2 + 2 + 2, 2 + 2]
    assert communicators_of(topology(Degrees(1, 1, 2, 1, chunks=3)))[1:3] == [2 + 2 + 5 * 2, 2 + 2 + 5 * 2]
    assert communicators_of(topology(Degrees(1, 1, 1, 1, tp=(1, 2, 1)))) == [2 + 2, 3 + 4, 3, 2 + 2]
    assert communicators_of(topology(Degrees(2, 2, 1, 2, colocated=True))) == [2, 2]
    assert communicators_of(topology(Degrees(1, 1, 2, 1)), [(1, 2)]) == [2 + 2, 2 + 4 + 1, 2 + 4 + 1, 2 + 2]


def test_fewer_queues_than_communicators_are_refused() -> None:
    pipeline = topology(Degrees(1, 1, 2, 1))
    needed = max(communicators_of(pipeline)) + COMPUTATION
    with pytest.raises(TopologyError, match=f"need {needed + 1} queues"):
        require_queues(pipeline, {VARIABLE: str(needed)}, tied=[(1, 2)])
    for environment in ({}, {VARIABLE: str(needed)}, {VARIABLE: "64"}):
        require_queues(pipeline, environment)
    for chosen in ("1", str(needed - 1), "many"):
        with pytest.raises(
            TopologyError, match=rf"{VARIABLE} is {chosen}; .* need {needed} queues.*set it to {QUEUES}"
        ):
            require_queues(pipeline, {VARIABLE: chosen})


def test_processes_on_cpus_need_no_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise TopologyError("a CPU has no queues")

    monkeypatch.setattr("trainclient.topology.process_groups.require_queues", refused)
    one = Topology.of(parsed(job_data(Degrees(1, 1, 1, 0, colocated=True), generation={"ratio": "0"})).spec)
    with process_groups(one, torch.device("cpu"), 60, HashStore(), 0):
        pass


def test_more_communicators_than_a_device_has_queues_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"^llm rank 0 stage 0 has 30 communicators, .* 35 queues.*chunks lower"):
        require_queues(topology(Degrees(1, 1, 2, 1, chunks=7)), {})


def test_where_all_move_rows_together_any_number_will_do() -> None:
    require_queues(topology(Degrees(2, 2, 1, 2, colocated=True)), {VARIABLE: "1"})
