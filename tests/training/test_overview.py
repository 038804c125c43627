"""What is said before the first step, of jobs of every kind."""

from typing import Any

import pytest
from builders.jobs import make_job
from disttrain.v1.plan_pb2 import StepPlan

from dataserver.planning.job.identity import parse_job
from trainclient.stream.errors import ClientError
from trainclient.topology.process_grid import Topology
from trainclient.training.config import TrainConfig
from trainclient.training.memory_need import needs, states
from trainclient.training.models import Models
from trainclient.training.overview import overview

OWN = {"vit": {"use": "modules.own_encoder:BlockEncoder", "options": {"hidden": 8}}}
MEMORY = {"budget_bytes": 12_345_678_901, "unit_bytes": 1000}


def prepared(changes: dict[str, Any], config: dict[str, Any], **execution: Any) -> tuple[Models, Topology]:
    data = make_job(encoder=2, backbone=(2, 2), generator=1).spec.model_dump(mode="json")
    for module in data["execution"]["modules"]:
        del module["cost"]["backward_percent"]  # is the job's to find out
        module |= changes.get(module["name"], {})
    data["execution"] |= execution
    spec = parse_job(data).spec
    return Models.of(TrainConfig.model_validate(config), spec), Topology.of(spec)


def said(changes: dict[str, Any], config: dict[str, Any], **execution: Any) -> list[str]:
    models, topology = prepared(changes, config, **execution)

    def get_plan(step: int) -> StepPlan:
        return StepPlan(step=step, makespan_after_ns=1_234_567_890, num_microbatches=4)

    return overview(models, topology, 3, get_plan).splitlines()


@pytest.mark.parametrize("config", [{}, {"dtype": "bfloat16", "backbone": {"sharding": "zero3", "lora": {"rank": 2}}}])
def test_what_parameters_take_is_what_memory_is_derived_from(config: dict[str, Any]) -> None:
    models, topology = prepared({"llm": {"tp": 2}, "vit": {"frozen": True}}, config)
    found = [(state.module.name, state.parameters, state.state_bytes) for state in states(models, topology)]
    assert found == [(n.module, n.parameters, n.state_bytes) for n in needs(models, topology, 10**9)]


def test_each_module_is_a_line_and_then_the_step() -> None:
    changes = {"vit": {"frozen": True, "memory": MEMORY}, "llm": {"tp": 2, "memory": MEMORY}, "dit": {"memory": MEMORY}}
    models, topology = prepared(changes, {})
    vit, llm, dit = states(models, topology)
    assert (vit.trained, dit.trained) == (0, dit.parameters)
    head, *rows, step = said(changes, {})
    assert head.split("  ")[0] == "module"
    cells = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]
    assert [row[:2] for row in cells] == [["vit", "encoder"], ["llm", "backbone"], ["dit", "generator"]]
    assert [row[3:5] for row in cells] == [
        ["frozen", "2 (dp 2)"],
        [f"{llm.trained / 1e6:,.1f} M", "8 (dp 2 x pp 2 x tp 2)"],
        [f"{dit.trained / 1e6:,.1f} M", "1"],
    ]
    assert {row[-1] for row in cells} == {"12.35"}
    assert step == (
        "step 4 should take 1,234.6 ms by the job's costs, the optimizer not counted, in 4 microbatches of each rank"
    )


def test_adapters_alone_are_trained() -> None:
    models, topology = prepared({}, {"backbone": {"lora": {"rank": 2}}})
    llm = states(models, topology)[1]
    assert llm.parameters is not None
    assert 0 < llm.trained < llm.parameters / 10


def test_what_is_not_known_is_said() -> None:
    _, own, *_, memory, step = said({"llm": {"cost": None}}, {"modules": OWN})
    assert own.split()[:4] == ["vit", "encoder", "not", "known"]
    assert memory.startswith("not known: memory for activations of vit and llm and dit, which plans take as endless; ")
    assert step.endswith("of each rank; llm: the default cost, not one of this model and device")
    assert "not known: what vit takes, a module of your own" in said({}, {"modules": OWN})

    def refused(_step: int) -> StepPlan:
        raise ClientError("no server\nanswers")

    assert (
        overview(*prepared({}, {}), 0, refused).splitlines()[-1] == "not known: the time of a step (no server answers)"
    )


def test_modules_that_share_devices() -> None:
    data = make_job(encoder=2, backbone=(2, 1), execution={"layout": {"kind": "colocated"}}).spec
    models, topology = Models.of(TrainConfig(), data), Topology.of(data)
    text = overview(models, topology, 0, lambda step: StepPlan(step=step, num_microbatches=1))
    assert "modules share devices: what they take of each adds up\n" in text
    assert text.endswith("in 1 microbatch of each rank\n")
