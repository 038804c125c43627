"""A run that trains adapters of its backbone: what it saves, that it resumes, and what is exported of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool
from torch import Tensor
from training.runs import steps_of, stored

from trainclient.checkpoint.export import ExportConfig, export
from trainclient.checkpoint.state import CheckpointError
from trainclient.models.hf import load_pretrained
from trainclient.models.lora import LowRank, is_adapter, merged
from trainclient.training.config import ConfigError, validate_config
from trainclient.training.models import Models

LORA: dict[str, Any] = {"rank": 2, "alpha": 4, "targets": ["query", "down"]}


def case(
    fleet: Fleet,
    degrees: Degrees,
    folder: Path,
    steps: int,
    dtype: str = "bfloat16",
    sharding: str = "none",
    kind: str = "backbone",
) -> Case:
    """A run to a step, with adapters of the backbone or the encoder."""
    training = {
        "steps": steps,
        kind: {"lora": LORA, "sharding": sharding},
        "metrics": str(folder / "metrics.jsonl"),
        "checkpoint": {"directory": str(folder), "every": 1},
        "optimizer": {"lr": 0.01},
    }
    job = fleet.job(degrees).spec.model_dump(mode="json")
    return Case(f"adapted-{steps}", fleet.address, job, dtype=dtype, training=training)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_adapters_are_trained_saved_and_exported(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    pool.run([case(fleet, Degrees(1, 1, 2, 1, frozen=("vit",)), tmp_path, 2)], tmp_path)
    pool.run([case(fleet, Degrees(2, 2, 1, 1, frozen=("vit",)), tmp_path, 3, sharding="zero3")], tmp_path)
    second, third = (stored(tmp_path / f"step-{step:08d}") for step in (2, 3))
    llm = {name: tensor for name, tensor in third.items() if name.startswith("llm.") and "/" not in name}
    moving = {name for name, tensor in llm.items() if not torch.equal(tensor, second[name])}
    assert moving == {name for name in llm if is_adapter(name)} | {"llm.query.weight"}
    assert {name.partition("/")[0] for name in third if name.startswith("llm.") and "/" in name} == moving
    assert all(tensor.dtype == (torch.float32 if name in moving else torch.bfloat16) for name, tensor in llm.items())

    assert export(ExportConfig(tmp_path, module="llm", output=tmp_path / "merged")) == ["query.weight"]
    state = {name.removeprefix("llm."): tensor for name, tensor in llm.items()}
    expected = merged(state, LowRank(**LORA))
    for name, tensor in load_pretrained(tmp_path / "merged").state.items():
        assert torch.equal(tensor, expected[name]), name
    export(ExportConfig(tmp_path, module="llm", output=tmp_path / "adapter", adapter=True))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2
    with pytest.raises(CheckpointError, match="module dit is a generator"):
        export(ExportConfig(tmp_path, module="dit", output=tmp_path / "none", adapter=True))

    flops = [step["flops"] for step in steps_of(tmp_path / "metrics.jsonl")]
    assert all(flops)


ONE = Degrees(1, 1, 1, 1, frozen=("vit",))
SHARED: dict[str, list[tuple[Degrees, str]]] = {
    "zero2": [(Degrees(1, 2, 1, 1, frozen=("vit",)), "zero2")],
    "zero3": [(Degrees(1, 2, 1, 1, frozen=("vit",)), "zero3")],
    "tp": [(Degrees(1, 1, 1, 1, frozen=("vit",), tp=(1, 2, 1)), "none")],
    "tp, shares": [(Degrees(1, 2, 1, 1, frozen=("vit",), tp=(1, 2, 1)), "zero2")],
    "tp, shares of shares": [(Degrees(1, 2, 1, 1, frozen=("vit",), tp=(1, 2, 1)), "zero3")],
    "tp, then none": [(Degrees(1, 1, 2, 1, frozen=("vit",), tp=(1, 2, 1)), "none"), (ONE, "none")],
    "none, then tp": [(ONE, "none"), (Degrees(1, 1, 1, 1, frozen=("vit",), tp=(1, 2, 1)), "none")],
}
"""Who trains the steps, in turn."""


@pytest.fixture(scope="module")
def alone(fleet: Fleet, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What a run of three steps with one process for each module saves, optimizer and all."""
    folder = tmp_path_factory.mktemp("alone")
    pool.run([case(fleet, ONE, folder, 3, "float64")], folder)
    return stored(folder / "step-00000003")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "tp" else pytest.mark.long) for n in SHARED])
def test_shares_and_parts_of_adapters_become_what_whole_ones_do(
    fleet: Fleet, pool: Pool, tmp_path: Path, alone: dict[str, Tensor], name: str
) -> None:
    for steps, (degrees, sharding) in zip((3,) if len(SHARED[name]) == 1 else (2, 3), SHARED[name], strict=True):
        pool.run([case(fleet, degrees, tmp_path, steps, "float64", sharding)], tmp_path)
    assert all(tensor.any() for key, tensor in alone.items() if is_adapter(key))
    found = stored(tmp_path / "step-00000003")
    assert found.keys() == alone.keys()
    for key, tensor in alone.items():
        assert (found[key] - tensor).norm() <= 1e-9 * tensor.norm(), key


ENCODER = Degrees(1, 1, 1, 1, frozen=("llm",))
OF_ENCODERS: dict[str, list[tuple[Degrees, str]]] = {
    "zero2": [(Degrees(2, 1, 1, 1, frozen=("llm",)), "zero2")],
    "zero3": [(Degrees(2, 1, 1, 1, frozen=("llm",)), "zero3")],
    "tp": [(Degrees(1, 1, 1, 1, frozen=("llm",), tp=(2, 1, 1)), "none")],
    "tp, shares": [(Degrees(2, 1, 1, 1, frozen=("llm",), tp=(2, 1, 1)), "zero2")],
    "tp, shares of shares": [(Degrees(2, 1, 1, 1, frozen=("llm",), tp=(2, 1, 1)), "zero3")],
    "tp, then none": [(Degrees(1, 1, 1, 1, frozen=("llm",), tp=(2, 1, 1)), "none"), (ENCODER, "none")],
}


@pytest.fixture(scope="module")
def encoder_alone(fleet: Fleet, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """As `alone`, with the adapters of an encoder."""
    folder = tmp_path_factory.mktemp("encoder")
    pool.run([case(fleet, ENCODER, folder, 3, "float64", kind="encoder")], folder)
    return stored(folder / "step-00000003")


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
@pytest.mark.parametrize("name", OF_ENCODERS)
def test_shares_and_parts_of_adapters_of_encoders_become_what_whole_ones_do(
    fleet: Fleet, pool: Pool, tmp_path: Path, encoder_alone: dict[str, Tensor], name: str
) -> None:
    """The projector, which is trained whole beside them, too."""
    runs = OF_ENCODERS[name]
    for steps, (degrees, sharding) in zip((3,) if len(runs) == 1 else (2, 3), runs, strict=True):
        pool.run([case(fleet, degrees, tmp_path, steps, "float64", sharding, "encoder")], tmp_path)
    trained = {key.partition("/")[0] for key in encoder_alone if "/" in key and key.startswith("vit.")}
    assert {is_adapter(key) or key.startswith("vit.merger.") for key in trained} == {True}
    found = stored(tmp_path / "step-00000003")
    assert found.keys() == encoder_alone.keys()
    for key, tensor in encoder_alone.items():
        assert (found[key] - tensor).norm() <= 1e-9 * tensor.norm(), key


@pytest.mark.parametrize(
    ("degrees", "config", "message"),
    [
        (Degrees(frozen=("llm",)), {"backbone": {"lora": LORA}}, "llm has lora adapters, but is frozen; leave frozen"),
        (Degrees(), {"modules": {"dit": {"lora": LORA}}}, "dit has lora adapters, but is of kind generator, which has"),
        (
            Degrees(),
            {"modules": {"vit": {"lora": LORA, "use": "modules.own_encoder:BlockEncoder"}}},
            "vit has lora adapters, but is of your own",
        ),
    ],
)
def test_what_cannot_have_adapters_is_named(
    fleet: Fleet, degrees: Degrees, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Models.of(validate_config(config), fleet.job(degrees).spec)
