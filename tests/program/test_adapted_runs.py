"""A run that trains adapters of its backbone: what it saves, that it resumes, and what is exported of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool
from training.runs import stored

from trainclient.checkpoint.export import ExportConfig, export
from trainclient.checkpoint.folder import CheckpointError
from trainclient.models.hf import load_pretrained
from trainclient.models.lora import LowRank, is_adapter, merged
from trainclient.training.config import ConfigError, validate_config
from trainclient.training.models import Models

LORA: dict[str, Any] = {"rank": 2, "alpha": 4, "targets": ["query", "down"]}


def case(
    fleet: Fleet, degrees: Degrees, folder: Path, steps: int, dtype: str = "bfloat16", sharding: str = "none"
) -> Case:
    """A run to a step, with a frozen encoder before its backbone."""
    training = {
        "steps": steps,
        "backbone": {"lora": LORA, "sharding": sharding},
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

    assert export(ExportConfig(tmp_path, "llm", tmp_path / "merged")) == ["query.weight"]
    state = {name.removeprefix("llm."): tensor for name, tensor in llm.items()}
    expected = merged(state, LowRank(**LORA))
    for name, tensor in load_pretrained(tmp_path / "merged").state.items():
        assert torch.equal(tensor, expected[name]), name
    export(ExportConfig(tmp_path, "llm", tmp_path / "adapter", adapter=True))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2
    with pytest.raises(CheckpointError, match="module dit is a generator"):
        export(ExportConfig(tmp_path, "dit", tmp_path / "none", adapter=True))

    flops = [json.loads(line)["flops"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(flops)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_shares_of_adapters_become_what_whole_ones_do(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    found = {}
    for sharding in ("none", "zero2", "zero3"):
        folder = tmp_path / sharding
        folder.mkdir()
        pool.run([case(fleet, Degrees(2, 2, 1, 1, frozen=("vit",)), folder, 2, "float64", sharding)], folder)
        found[sharding] = stored(folder / "step-00000002")
    assert any(is_adapter(name) and tensor.any() for name, tensor in found["none"].items())
    for sharding in ("zero2", "zero3"):
        assert found[sharding].keys() == found["none"].keys()
        for name, tensor in found["none"].items():
            torch.testing.assert_close(found[sharding][name], tensor, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("degrees", "config", "message"),
    [
        (Degrees(frozen=("llm",)), {"backbone": {"lora": LORA}}, "llm has lora adapters, but is frozen; leave frozen"),
        (Degrees(peers=(1, 2, 1)), {"backbone": {"lora": LORA}}, "llm has lora adapters, but has tp 2, and their"),
        (
            Degrees(),
            {"modules": {"vit": {"lora": LORA}}},
            "vit has lora adapters, but is of kind encoder",
        ),
    ],
)
def test_what_cannot_have_adapters_is_named(
    fleet: Fleet, degrees: Degrees, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Models.of(validate_config(config), fleet.job(degrees).spec)
