"""A run with frozen modules: what it saves, that it goes on with other modules frozen, and what is exported of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults.disk import missing, small_disk
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from training.runs import steps_of

from dataserver.assembly.tokens import ByteTokenizer, tokenizer_spec
from dataserver.outputs import OutputError
from trainclient.checkpoint.export import ExportConfig, export
from trainclient.checkpoint.state import read_manifest, write_manifest
from trainclient.models.hf import PretrainedError
from trainclient.training.gradients import scale_gradients, square_sum
from trainclient.training.optimizer import Optimizer
from trainclient.training.optimizer_config import OptimizerConfig


def stored(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def case(fleet: Fleet, degrees: Degrees, folder: Path, steps: int, lr: float = 0.01) -> Case:
    """A run to a step in bfloat16 that saves every step."""
    job = fleet.job(degrees).spec.model_dump(mode="json")
    training = {
        "steps": steps,
        "metrics": str(folder / "metrics.jsonl"),
        "checkpoint": {"directory": str(folder), "every": 1},
        "optimizer": {"lr": lr},
    }
    return Case(f"frozen-{steps}", fleet.address, job, dtype="bfloat16", training=training)


def module_of(name: str) -> str:
    return name.split(".")[0]


def assert_spoken(folder: Path) -> None:
    """Special tokens and the longest sequence are the job's, which nobody named on the command line."""
    told = json.loads((folder / "config.json").read_text())
    ids = tokenizer_spec(ByteTokenizer())
    assert [told[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [ids.bos, ids.eos, None]
    assert told["max_position_embeddings"] == 192


def refused_exports(folder: Path) -> None:
    """Nothing is left of those that end early."""
    config = ExportConfig(folder, module="llm", output=folder / "disk" / "new" / "exported")
    if not missing():
        with small_disk(folder / "disk") as disk:
            with pytest.raises(
                OutputError, match=r"the folder \S+/exported cannot be written \(No space left on device"
            ):
                export(config)
            assert list(disk.iterdir()) == []
        (folder / "disk").rmdir()
    state = folder / "step-00000002" / "trainer.json"
    whole = state.read_text()
    manifest = read_manifest(state.parent)
    silent = replace(manifest.state, cursor={"step": 2, "stream": "{}"})
    write_manifest(state.parent, replace(manifest, state=silent))
    with pytest.raises(
        PretrainedError, match="does not say what its job's tokenizer and longest sequence are; give --"
    ):
        export(config)
    state.write_text(whole)
    assert not list(folder.rglob("*exported*tmp"))


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_a_run_with_frozen_modules_goes_on_with_others_frozen(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    frozen = ("vit", "llm")
    pool.run([case(fleet, Degrees(1, 1, 1, 1, frozen=frozen), tmp_path, 2)], tmp_path)
    first, second = (stored(tmp_path / f"step-{step:08d}") for step in (1, 2))
    assert first.keys() == second.keys()
    assert {module_of(name) for name in second} == {"vit", "llm", "dit"}
    assert {module_of(name) for name in second if "/" in name} == {"dit"}
    kept = {name: value for name, value in second.items() if module_of(name) in frozen}
    assert all(torch.equal(value, first[name]) and value.dtype == torch.bfloat16 for name, value in kept.items())
    assert not torch.equal(first["dit.output.weight"], second["dit.output.weight"])
    assert read_manifest(tmp_path / "step-00000002").state.frozen == list(frozen)
    assert [step["lr"].keys() for step in steps_of(tmp_path / "metrics.jsonl")] == [{"dit"}] * 2

    export(ExportConfig(tmp_path, module="llm", output=tmp_path / "exported"))
    assert_spoken(tmp_path / "exported")
    refused_exports(tmp_path)

    said = pool.said(0)
    pool.run([case(fleet, Degrees(2, 2, 1, 1, frozen=("dit",)), tmp_path, 3, lr=0.002)], tmp_path)
    assert pool.said(0).removeprefix(said).splitlines() == [
        "changed on resume: vit: frozen -> trained with lr 0.002; its moments begin at zero",
        "changed on resume: llm: frozen -> trained with lr 0.002; its moments begin at zero",
        "changed on resume: dit: trained -> frozen; its moments end with this checkpoint",
    ]
    third = stored(tmp_path / "step-00000003")
    assert {module_of(name) for name in third if "/" in name} == set(frozen)
    assert all(value == 1 for name, value in third.items() if name.endswith("/step"))
    assert torch.equal(third["dit.output.weight"], second["dit.output.weight"].bfloat16()), "as it computes"
    changed, before = (step["llm.layers.0.mlp.up.weight"] for step in (third, second))
    assert float((changed - before).abs().max()) == pytest.approx(0.002, rel=0.1), (
        "a first update of AdamW: the new rate"
    )


def projector_case(fleet: Fleet, folder: Path, steps: int, **encoder: object) -> Case:
    """A run in double precision, with two ranks of the encoder."""
    training = {"steps": steps, "checkpoint": {"directory": str(folder), "every": 1}, "optimizer": {"lr": 0.01}}
    training |= {"encoder": {"freeze_tower": True, **encoder}, "metrics": str(folder / "metrics.jsonl")}
    job = fleet.job(Degrees(2, 1, 1, 0), generation={"ratio": "0"}).spec.model_dump(mode="json")
    return Case(f"projector-{steps}", fleet.address, job, dtype="float64", training=training)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_a_projector_is_trained_alone_and_its_tower_thawed_later(
    fleet: Fleet, pool: Pool, tmp_path: Path, sharding: str
) -> None:
    """A run that resumes is the run that was not interrupted, bit for bit; of the tower no bit changes."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pool.run([projector_case(fleet, whole, 3, sharding=sharding)], tmp_path)
    pool.run([projector_case(fleet, parts, 2, sharding=sharding)], tmp_path)
    pool.run([projector_case(fleet, parts, 3, sharding=sharding)], tmp_path)
    first, third, again = (stored(folder / f"step-{n:08d}") for folder, n in ((whole, 1), (whole, 3), (parts, 3)))
    assert third.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in third.items())
    changed = {name for name in third if not torch.equal(third[name], first[name])}
    ours = {name for name in third if name.startswith("vit.") and "/" not in name}
    projector = {name for name in ours if name.startswith("vit.merger.")}
    assert changed & ours == projector != set()
    assert {name.partition("/")[0] for name in third if name.startswith("vit.") and "/" in name} == projector
    assert [step["lr"].keys() for step in steps_of(whole / "metrics.jsonl")] == [{"vit", "llm"}] * 3

    said = pool.said(0)
    pool.run([projector_case(fleet, parts, 4, sharding=sharding, freeze_tower=False)], tmp_path)
    told = "changed on resume: vit: tower frozen -> trained with lr 0.01; its moments begin at zero"
    assert pool.said(0).removeprefix(said).splitlines() == [told]
    fourth = stored(parts / "step-00000004")
    assert {name.partition("/")[0] for name in fourth if name.startswith("vit.") and "/" in name} == ours
    counts = {name.partition("/")[0]: int(value) for name, value in fourth.items() if name.endswith("/step")}
    assert {counts[name] for name in projector} == {4}
    assert {counts[name] for name in ours - projector} == {1}
    assert not torch.equal(fourth["vit.layers.0.mlp.up.weight"], third["vit.layers.0.mlp.up.weight"])


def test_a_process_without_anything_to_train_still_takes_part() -> None:
    module = torch.nn.Linear(2, 2).requires_grad_(requires_grad=False)
    optimizer = Optimizer(dict(module.named_parameters()), OptimizerConfig(), {})
    before = module.weight.clone()
    optimizer.step(0, {})
    optimizer.publish()
    assert torch.equal(module.weight, before)
    assert optimizer.tensors().keys() == {"weight", "bias"}
    assert float(square_sum([])) == 0
    scale_gradients([], 0.5)
