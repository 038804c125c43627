"""Checkpoints on disk."""

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from crc32c import crc32c as crc32c_of

from trainclient.checkpoint.folder import Checkpoints
from trainclient.checkpoint.lease import Lease, take
from trainclient.checkpoint.lease_file import Output
from trainclient.checkpoint.owner import Owner
from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.selection import last_owner, survey
from trainclient.checkpoint.state import (
    STATE_VERSION,
    CheckpointError,
    FileSum,
    Line,
    Manifest,
    SaveError,
    TrainerState,
    Writer,
    read_manifest,
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


def newest(checkpoints: Checkpoints, wanted: int | ResumeFrom = ResumeFrom.NEWEST, settings: str = "") -> Path | None:
    """Where the checkpoint lies from which a run would continue."""
    found = checkpoints.resume_point(wanted, settings)
    return found and found.path


def test_round_trip(checkpoints: Checkpoints) -> None:
    assert checkpoints.resume_point() is None
    for step in (1, 2, 3):
        checkpoints.save(tensors(step / 3), state(step))
    path = newest(checkpoints)
    assert path is not None
    assert [s.path.name for s in reversed(survey(path.parent).stored)] == ["step-00000002", "step-00000003"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-00000002", "step-00000003"]
    assert read_manifest(path).state == state(3)
    found = tensors(0)
    checkpoints.load(path, found)
    for name, tensor in tensors(1.0).items():
        assert torch.equal(found[name], tensor)


def test_every_byte_is_on_storage_before_a_checkpoint_has_its_name(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave the newest one damaged, with those before it removed."""
    synced, sync = dict[int, int](), os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", noted)
    checkpoints.save(tensors(1), state(1))
    path = newest(checkpoints)
    assert path is not None
    files = [file.stat() for file in path.iterdir()]
    assert len(files) == 3
    assert [synced[file.st_ino] for file in files] == [file.st_size for file in files]


def test_a_module_that_was_frozen_is_read_without_state(checkpoints: Checkpoints) -> None:
    weights = {name: tensor for name, tensor in tensors(1).items() if "/" not in name}
    checkpoints.save(weights, replace(state(1), frozen=["vit"]))
    path = newest(checkpoints)
    assert path is not None
    found = read_manifest(path).state
    assert found.frozen == ["vit"]
    with pytest.raises(CheckpointError, match=r"holds nothing for vit\.weight/step"):
        checkpoints.load(path, replace(found, frozen=["llm"]).readable(tensors(0)))
    trained = tensors(0)
    checkpoints.load(path, found.readable(trained))
    assert torch.equal(trained["vit.weight"], weights["vit.weight"])
    assert float(trained["vit.weight/step"]) == 0


def test_what_has_the_name_already_is_set_aside(
    checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a run went back to an older step: nothing is lost, and the run goes on with its own."""
    for value in (1, 2, 3):
        checkpoints.save(tensors(value), state(5))
    path = newest(checkpoints)
    assert path is not None
    assert loaded(checkpoints, path) == 3
    asides = sorted((tmp_path / "checkpoints").glob("aside-step-00000005-*"))
    assert [loaded(checkpoints, aside) for aside in asides] == [1, 2]
    warnings = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in warnings] == [str(aside) for aside in asides]


def loaded(checkpoints: Checkpoints, path: Path) -> float:
    """The value of all tensors in a checkpoint."""
    found = tensors(0)
    checkpoints.load(path, found)
    assert found["vit.weight"].unique().tolist() == [float(found["vit.weight/step"])]
    return float(found["vit.weight/step"])


def test_only_what_the_run_wrote_is_removed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        checkpoints.save(tensors(step), replace(state(step), run="theirs"))
    for step in (3, 4):
        checkpoints.save(tensors(step), replace(state(step), run="ours"))
    shutil.copytree(root / "step-00000003", root / "step-00000900")
    shutil.copytree(root / "step-00000003", root / "milestone")
    assert newest(checkpoints) == root / "step-00000004"
    for step in (5, 6, 7):
        checkpoints.save(tensors(step), replace(state(step), run="ours"))
    kept = [f"step-{step:08d}" for step in (1, 2, 6, 7, 900)]
    assert sorted(p.name for p in root.iterdir()) == ["milestone", *kept]


def test_what_was_left_behind_is_not_removed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    many = Checkpoints(root, keep=9, group=dist.group.WORLD)
    for step in (1, 2, 3, 4, 9):
        many.save(tensors(step), state(step))
    assert newest(checkpoints, 2, "settings") == root / "step-00000002"
    for step in (3, 4, 5):
        checkpoints.save(tensors(step + 10), state(step))
    again = Checkpoints(root, keep=2, group=dist.group.WORLD)
    assert newest(again, 2, "settings") == root / "step-00000005"
    again.save(tensors(16), state(6))
    names = sorted(p.name.rpartition("-step-")[2][:8] if "aside" in p.name else p.name for p in root.iterdir())
    assert names == ["00000003", "00000004", "step-00000005", "step-00000006", "step-00000009"]
    asides = sorted(root.glob("aside-*"))
    assert [loaded(checkpoints, aside) for aside in asides] == [3, 4]


def owned(root: Path, run: str) -> Checkpoints:
    """The folder, taken over by a run that goes on from the newest checkpoint there."""
    lease = take(Output("the folder", root), Owner.here(run), take_over=True)
    found = Checkpoints(root, keep=2, group=dist.group.WORLD, lease=lease)
    found.resume_point()
    return found


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if not path.name.startswith(".lease-")}


@pytest.mark.usefixtures("checkpoints")
def test_who_lost_the_folder_publishes_and_removes_nothing(tmp_path: Path) -> None:
    old = owned(tmp_path / "ckpt", "old")
    for step in (1, 2):
        old.save(tensors(step), state(step))
    new = owned(tmp_path / "ckpt", "new")
    before = names(tmp_path / "ckpt")
    for action in (lambda: old.save(tensors(3), state(3)), lambda: old.amend(state(2)), old.resume_point):
        with pytest.raises(SaveError, match="the folder was taken over from this run by another one: run new, process"):
            action()
        assert names(tmp_path / "ckpt") == before
    new.save(tensors(3), state(3))
    assert names(tmp_path / "ckpt") == {"step-00000002", "step-00000003"}


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize(("is_there", "step"), [(False, 2), (True, 2), (False, 3)])
def test_who_is_stopped_between_its_last_look_and_its_rename(
    tmp_path: Path, is_there: bool, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run takes over, publishes the same step or another one, and then this one goes on."""
    root, to_come, renew, news = tmp_path / "ckpt", ["before it writes", "before it publishes"], Lease.renew, []
    if is_there:
        owned(root, "first").save(tensors(7), state(2))
    old = owned(root, "old")

    def look(lease: Lease) -> None:
        renew(lease)
        if lease.owner.run == "old" and to_come and to_come.pop(0) == "before it publishes":
            news.append(owned(root, "new"))
            news[0].save(tensors(9), state(step))

    monkeypatch.setattr(Lease, "require", look)
    with pytest.raises(SaveError, match="was taken over from this run by another one: run new"):
        old.save(tensors(8), state(2))
    assert loaded(news[0], root / f"step-{step:08d}") == 9
    assert newest(news[0]) == root / f"step-{step:08d}"
    assert [loaded(news[0], aside) for aside in root.glob("aside-*")] == [7] * is_there
    assert len(names(root)) == 1 + is_there


@pytest.mark.usefixtures("checkpoints")
def test_who_is_stopped_before_it_amends_a_checkpoint_changes_none_of_the_next_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, renew, news = tmp_path / "ckpt", Lease.renew, []
    old = owned(root, "old")
    old.save(tensors(8), replace(state(2), unevaluated={"step": 1}))
    looks = ["before it writes", "before it publishes"]

    def look(lease: Lease) -> None:
        renew(lease)
        if lease.owner.run == "old" and looks and looks.pop(0) == "before it publishes":
            news.append(owned(root, "new"))
            news[0].save(tensors(9), state(2))

    monkeypatch.setattr(Lease, "require", look)
    with pytest.raises(SaveError, match="was taken over from this run by another one: run new"):
        old.amend(state(2))
    assert newest(news[0]) == root / "step-00000002"
    writer = read_manifest(root / "step-00000002").writer
    assert writer is not None
    assert writer.number == 2
    assert loaded(news[0], root / "step-00000002") == 9
    assert len(names(root)) == 2


def test_a_checkpoint_says_who_wrote_it(checkpoints: Checkpoints, tmp_path: Path) -> None:
    ours = owned(tmp_path / "ckpt", "ours")
    for step in (1, 2):
        ours.save(tensors(step), replace(state(step), degrees={"vit": {"dp": 2}}))
    found = read_manifest(tmp_path / "ckpt" / "step-00000002")
    assert found.writer is not None
    assert (found.writer.pid, found.writer.host, found.writer.number) == (str(os.getpid()), socket.gethostname(), 1)
    assert found.state.degrees == {"vit": {"dp": 2}}
    assert set(found.files or {}) == {".metadata", "__0_0.distcp"}
    checkpoints.save(tensors(1), state(1))
    assert last_owner(tmp_path / "ckpt") == 1
    assert last_owner(tmp_path / "checkpoints") == last_owner(tmp_path / "nothing") == 0


def test_missing_and_misshapen_tensors_are_named(checkpoints: Checkpoints) -> None:
    checkpoints.save(tensors(1), state(1))
    path = newest(checkpoints)
    assert path is not None
    with pytest.raises(CheckpointError, match=r"holds nothing for dit\.weight, and \[2\] is needed"):
        checkpoints.load(path, {"dit.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"holds \[3, 4\] for vit\.weight, and \[4, 3\] is needed"):
        checkpoints.load(path, {"vit.weight": torch.zeros(4, 3)})


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "rubbish", "flipped"])
@pytest.mark.parametrize("kind", [".metadata", "*.distcp"])
def test_damaged_files_are_named(
    checkpoints: Checkpoints, kind: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        checkpoints.save(tensors(step), state(step))
    path = newest(checkpoints)
    assert path is not None
    (file,) = path.glob(kind)
    content = file.read_bytes()
    file.unlink()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    changed = {"empty": b"", "cut": content[:-1], "rubbish": b"no" * len(content), "flipped": bytes(flipped)}
    if damage != "gone":
        file.write_bytes(changed[damage])
    for wanted in (ResumeFrom.NEWEST, 2):
        with pytest.raises(
            CheckpointError, match=rf"{path} cannot be read \(rank 0: {file.name}.*newest-whole"
        ) as caught:
            checkpoints.resume_point(wanted)
        assert "Traceback" not in str(caught.value)
    sums = re.search(r"has CRC-32C (\w{8}), and was written with (\w{8})", str(caught.value))
    expected = json.loads((path / "trainer.json").read_text())["files"][file.name]["crc32c"]
    assert (sums is not None) == (damage == "flipped")
    assert sums is None or (sums[1], sums[2]) == (f"{crc32c_of(bytes(flipped)):08x}", expected)
    assert capsys.readouterr().err == ""
    older = newest(checkpoints, ResumeFrom.NEWEST_WHOLE)
    assert older == path.with_name("step-00000001")
    assert f"warning: {path} is passed over (rank 0: {file.name}" in capsys.readouterr().err
    checkpoints.save(tensors(3), state(2))
    assert newest(checkpoints) == path
    assert loaded(checkpoints, path) == 3


def test_no_checkpoint_is_whole(checkpoints: Checkpoints) -> None:
    checkpoints.save(tensors(1), state(1))
    path = newest(checkpoints)
    assert path is not None
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole; begin anew in another folder"):
        checkpoints.resume_point(ResumeFrom.NEWEST_WHOLE)


def test_a_file_more_is_named_and_left(checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints.save(tensors(1), state(1))
    path = newest(checkpoints)
    assert path is not None
    (path / "notes.txt").write_text("the good one")
    assert newest(checkpoints) == path
    assert f"{path} has files that it was not written with, which are not read: notes.txt" in capsys.readouterr().err
    assert (path / "notes.txt").exists()


def test_a_folder_that_cannot_be_written_to_is_known_before_the_first_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    assert checkpoints.resume_point() is None
    file = tmp_path / "file"
    file.touch()
    for folder, reason in ((file, "File exists"), (file / "checkpoints", "Not a directory")):
        with pytest.raises(SaveError, match=rf"no checkpoint can be written to {folder} \(rank 0: {reason}: .*check"):
            Checkpoints(folder, keep=2, group=dist.group.WORLD).resume_point()


def test_incomplete_ones_are_passed_over_and_swept(checkpoints: Checkpoints, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    checkpoints.save(tensors(1), state(1))
    left, unknown = f".partial-00000000-{'0a' * 16}-step-00000002", (".partial-step-00000002", "step-00000007", "other")
    for name in (left, *unknown):
        (root / name).mkdir()
    assert [s.path.name for s in survey(root).stored] == ["step-00000001"]
    checkpoints.save(tensors(3), state(3))
    assert {p.name for p in root.iterdir()} == {"step-00000001", "step-00000003", *unknown}


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize("gone", ["folder", "tensors"])
def test_who_reads_what_the_next_owner_has_removed_hears_of_that_owner(tmp_path: Path, gone: str) -> None:
    old, path = owned(tmp_path / "ckpt", "old"), tmp_path / "ckpt" / "step-00000001"
    old.save(tensors(1), state(1))
    owned(tmp_path / "ckpt", "new")
    for file in path.iterdir() if gone == "folder" else [path / "__0_0.distcp"]:
        file.unlink()
    with pytest.raises(SaveError, match="taken over from this run"):
        old.load(path, tensors(0))


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize("moment", ["looking", "chosen"])
@pytest.mark.parametrize("wanted", [ResumeFrom.NEWEST, ResumeFrom.NEWEST_WHOLE, 1])
def test_who_chooses_what_the_next_owner_removes_meanwhile_hears_of_that_owner(
    tmp_path: Path, wanted: int | ResumeFrom, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, root = owned(tmp_path / "ckpt", "old"), tmp_path / "ckpt"
    old.save(tensors(1), state(1))
    takes = []

    def read(path: Path) -> Manifest:
        if not takes:
            takes.append(take(Output("the folder", root), Owner.here("new"), take_over=True))
            shutil.rmtree(path)
        return read_manifest(path)

    module = "selection" if moment == "looking" else "folder"
    monkeypatch.setattr(f"trainclient.checkpoint.{module}.read_manifest", read)
    with pytest.raises(SaveError, match="was taken over from this run by another one: run new"):
        old.resume_point(wanted)


@pytest.mark.usefixtures("checkpoints")
def test_an_owner_that_was_stopped_does_not_sweep_what_the_next_one_writes(tmp_path: Path) -> None:
    """It had looked at its lease just before."""
    first, root = owned(tmp_path / "ckpt", "first"), tmp_path / "ckpt"
    first.save(tensors(1), state(1))
    earlier, later = (root / f".partial-{number:08d}-{'0a' * 16}-step-00000002" for number in (1, 2))
    for path in (earlier, later):
        path.mkdir()
    assert last_owner(root) == 2
    first.save(tensors(2), state(2))
    assert {p.name for p in root.iterdir() if p.is_dir()} == {"step-00000001", "step-00000002", later.name}
    shutil.rmtree(later)
    assert last_owner(root) == 1


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
        read_manifest(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    data = {"cursor": {"step": 1}, "modules": {}, "images": 0, "invalid_images": 0, "version": 9}
    for more in ({}, {"of_another_release": 1}):
        (tmp_path / "trainer.json").write_text(json.dumps(data | more))
        with pytest.raises(CheckpointError, match="state version 9; this release reads 2 to 5"):
            read_manifest(tmp_path)


KINDS = (TrainerState, Manifest, FileSum, Writer, Line, StepMetrics, EvaluationMetrics)


def test_a_version_stands_for_fields() -> None:
    """With another field under the same version, a build without it would not know why it cannot read a state."""
    names = " ".join(f.name for kind in KINDS for f in fields(kind))
    assert (STATE_VERSION, hashlib.sha256(names.encode()).hexdigest()[:12]) == (5, "a2a78b5779b5")


def test_what_is_besides_tensors_may_change(checkpoints: Checkpoints) -> None:
    checkpoints.save(tensors(1), replace(state(5), unevaluated={"step": 4}))
    checkpoints.amend(state(5))
    path = newest(checkpoints)
    assert path is not None
    assert read_manifest(path).state == state(5)
    found = tensors(0)
    checkpoints.load(path, found)
    assert float(found["vit.weight/step"]) == 1
    assert not [p.name for p in path.iterdir() if "trainer.json" in p.name and p.name != "trainer.json"]


@pytest.mark.parametrize("noise", [{"noise_version": 1}, {"noise_version": 3}, {}])
def test_other_noise_is_refused(tmp_path: Path, noise: dict[str, int]) -> None:
    """Checkpoints that do not say which were made before there were several."""
    data = {"cursor": {"step": 1}, "modules": {}, "images": 0, "invalid_images": 0, "version": 2, "noise_version": 2}
    (tmp_path / "trainer.json").write_text(json.dumps(data))
    assert read_manifest(tmp_path).state.noise_version == 2
    del data["noise_version"]
    (tmp_path / "trainer.json").write_text(json.dumps(data | noise))
    with pytest.raises(CheckpointError, match=f"noise version {noise.get('noise_version', 1)}; this release makes 2"):
        read_manifest(tmp_path)


def test_a_tied_model_of_an_older_release_is_told_the_way_out(tmp_path: Path) -> None:
    state(1).require_modules({"llm": {"layers": 4, "tied": False}}, tmp_path)
    with pytest.raises(CheckpointError, match="Export the checkpoint with `trainclient export` of that release"):
        state(1).require_modules({"llm": {"layers": 4, "tied": True}}, tmp_path)
