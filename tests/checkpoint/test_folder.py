"""Checkpoints on disk."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainclient.checkpoint.folder import (
    STATE_VERSION,
    CheckpointError,
    Checkpoints,
    SaveError,
    TrainerState,
    complete_checkpoints,
    read_state,
)
from trainclient.training.metrics import EvaluationMetrics, StepMetrics

MODULES = {"vit": {"layers": 2}, "llm": {"layers": 4}}


def state(step: int) -> TrainerState:
    cursor = {"version": 1, "stream_id": "a" * 64, "step": step, "stream": "{}"}
    return TrainerState(cursor, MODULES, images=10 * step, invalid_images=step)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"vit.weight": torch.full((3, 4), value), "vit.weight/step": torch.tensor(value), "b": torch.zeros(0)}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    """A world of one process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Checkpoints(tmp_path / "checkpoints", keep=2, group=dist.group.WORLD)
    dist.destroy_process_group()


def test_round_trip(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    for step in (1, 2, 3):
        checkpoints.save(tensors(step / 3), state(step))
    path = checkpoints.latest()
    assert path is not None
    assert [p.name for p in complete_checkpoints(path.parent)] == ["step-00000002", "step-00000003"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-00000002", "step-00000003"]
    assert read_state(path) == state(3)
    found = tensors(0)
    checkpoints.load(path, found)
    for name, tensor in tensors(1.0).items():
        assert torch.equal(found[name], tensor)


def test_a_module_that_was_frozen_is_read_without_state(checkpoints: Checkpoints) -> None:
    weights = {name: tensor for name, tensor in tensors(1).items() if "/" not in name}
    checkpoints.save(weights, replace(state(1), frozen=["vit"]))
    path = checkpoints.latest()
    assert path is not None
    found = read_state(path)
    assert found.frozen == ["vit"]
    with pytest.raises(CheckpointError, match=r"holds nothing for vit\.weight/step"):
        checkpoints.load(path, replace(found, frozen=["llm"]).readable(tensors(0)))
    trained = tensors(0)
    checkpoints.load(path, found.readable(trained))
    assert torch.equal(trained["vit.weight"], weights["vit.weight"])
    assert float(trained["vit.weight/step"]) == 0


def test_the_same_step_again_replaces(checkpoints: Checkpoints) -> None:
    checkpoints.save(tensors(1), state(5))
    checkpoints.save(tensors(2), state(5))
    path = checkpoints.latest()
    assert path is not None
    found = tensors(0)
    checkpoints.load(path, found)
    assert float(found["vit.weight/step"]) == 2


def test_missing_and_misshapen_tensors_are_named(checkpoints: Checkpoints) -> None:
    checkpoints.save(tensors(1), state(1))
    path = checkpoints.latest()
    assert path is not None
    with pytest.raises(CheckpointError, match=r"holds nothing for dit\.weight, and \[2\] is needed"):
        checkpoints.load(path, {"dit.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"holds \[3, 4\] for vit\.weight, and \[4, 3\] is needed"):
        checkpoints.load(path, {"vit.weight": torch.zeros(4, 3)})


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "rubbish"])
@pytest.mark.parametrize("kind", [".metadata", "*.distcp"])
def test_damaged_files_are_named(checkpoints: Checkpoints, kind: str, damage: str) -> None:
    checkpoints.save(tensors(1), state(1))
    path = checkpoints.latest()
    assert path is not None
    (file,) = path.glob(kind)
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "rubbish": b"no" * len(content)}[damage])
    with pytest.raises(CheckpointError, match=rf"the checkpoint {path} cannot be read \(") as caught:
        checkpoints.load(path, tensors(0))
    assert "Traceback" not in str(caught.value)


def test_a_folder_that_cannot_be_written_to_is_known_before_the_first_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    assert checkpoints.latest() is None
    file = tmp_path / "file"
    file.touch()
    for folder, reason in ((file, "File exists"), (file / "checkpoints", "Not a directory")):
        with pytest.raises(SaveError, match=rf"no checkpoint can be written to {folder} \(rank 0: {reason}: .*check"):
            Checkpoints(folder, keep=2, group=dist.group.WORLD).latest()


def test_incomplete_ones_are_passed_over_and_swept(checkpoints: Checkpoints, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    checkpoints.save(tensors(1), state(1))
    for name in (".partial-step-00000002", "step-00000007", "other"):
        (root / name).mkdir()
    assert [p.name for p in complete_checkpoints(root)] == ["step-00000001"]
    checkpoints.save(tensors(3), state(3))
    assert not list(root.glob(".partial-*"))


def test_other_models_are_refused(tmp_path: Path) -> None:
    state(1).require_modules({"llm": {"layers": 4}}, tmp_path)
    with pytest.raises(CheckpointError, match=r"vit\.layers: 3 here, 2 there"):
        state(1).require_modules({"vit": {"layers": 3}}, tmp_path)
    with pytest.raises(CheckpointError, match="no module dit there"):
        state(1).require_modules({"dit": {"layers": 3}}, tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cursor": {}, "modules": {}, "more": 1, "version": 2}'])
def test_unreadable_state_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    data = {"cursor": {"step": 1}, "modules": {}, "images": 0, "invalid_images": 0, "version": 9}
    for more in ({}, {"of_another_release": 1}):
        (tmp_path / "trainer.json").write_text(json.dumps(data | more))
        with pytest.raises(CheckpointError, match="state version 9; this release reads 2, 3 and 4"):
            read_state(tmp_path)


def test_a_version_stands_for_fields() -> None:
    """With another field under the same version, a build without it would not know why it cannot read a state."""
    names = " ".join(f.name for kind in (TrainerState, StepMetrics, EvaluationMetrics) for f in fields(kind))
    assert (STATE_VERSION, hashlib.sha256(names.encode()).hexdigest()[:12]) == (4, "17c0ceb42692")


def test_what_is_besides_tensors_may_change(checkpoints: Checkpoints) -> None:
    checkpoints.save(tensors(1), replace(state(5), unevaluated={"step": 4}))
    checkpoints.amend(state(5))
    path = checkpoints.latest()
    assert path is not None
    assert read_state(path) == state(5)
    found = tensors(0)
    checkpoints.load(path, found)
    assert float(found["vit.weight/step"]) == 1
    assert not [p.name for p in path.iterdir() if "trainer.json" in p.name and p.name != "trainer.json"]


@pytest.mark.parametrize("noise", [{"noise_version": 1}, {"noise_version": 3}, {}])
def test_other_noise_is_refused(tmp_path: Path, noise: dict[str, int]) -> None:
    """Checkpoints that do not say which were made before there were several."""
    data = {"cursor": {"step": 1}, "modules": {}, "images": 0, "invalid_images": 0, "version": 2, "noise_version": 2}
    (tmp_path / "trainer.json").write_text(json.dumps(data))
    assert read_state(tmp_path).noise_version == 2
    del data["noise_version"]
    (tmp_path / "trainer.json").write_text(json.dumps(data | noise))
    with pytest.raises(CheckpointError, match=f"noise version {noise.get('noise_version', 1)}; this release makes 2"):
        read_state(tmp_path)
