"""The list of a folder's checkpoints, as a user sees it."""

import os
import re
import shutil
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from cli.forked import forks

from trainclient.checkpoint.lease import take
from trainclient.checkpoint.lease_file import Output
from trainclient.checkpoint.owner import Owner
from trainclient.checkpoint.state import FileSum, Line, Manifest, TrainerState, Writer, write_manifest
from trainclient.checkpoint.sums import sum_of
from trainclient.cli import main
from trainclient.processes import identity


def add(folder: Path, step: int, line: Line | None = None) -> Path:
    """A checkpoint of one file."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"abc" * 1000)
    degrees = {"vit": {"dp": 2, "tp": 1, "pp": 1, "sp": 1}, "llm": {"dp": 1, "tp": 1, "pp": 1, "sp": 1}}
    cursor = {"version": 1, "stream_id": "0123456789abcdef" * 4, "step": step, "stream": "{}"}
    writer = Writer("node-1", "17", "fedcba98" * 4, 3, "0.1.0", "2026-01-02T03:04:05+00:00")
    state = TrainerState(cursor, {}, run="76543210", degrees=degrees)
    write_manifest(path, Manifest(state, {"data": sum_of(path / "data")}, writer, line or Line()))
    return path


def test_a_folder_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        add(tmp_path, step)
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 0
    heading, first, second, newest = capsys.readouterr().out.splitlines()
    assert " ".join(heading.split()) == "checkpoint step stream degrees size whole run host attempt saved"
    fields = "1 0123456789ab llm dp1, vit dp2 2.93 KiB yes 76543210 node-1 fedcba98 2026-01-02T03:04:05+00:00"
    assert first.split() == ["step-00000001", *fields.split()]
    assert second.split()[:2] == ["step-00000002", "2"]
    assert newest == "step-00000002: newest: a run goes on from here"


def test_what_is_odd_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = add(tmp_path, 4)
    flipped = add(tmp_path, 2) / "data"
    flipped.write_bytes(b"abc" * 999 + b"abd")
    shutil.copytree(last, tmp_path / "step-00000900")
    shutil.copytree(last, tmp_path / "milestone")
    (last / "notes").write_text("")
    (tmp_path / "other").mkdir()
    lease = take(Output("the folder", tmp_path), Owner.here("ours"))
    assert main(["checkpoints", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("sizes fit") == 4
    assert "step-00000900: its name says step 900, and it holds step 4" in out
    assert "milestone: holds step 4, and no run goes on from a folder of this name" in out
    assert "step-00000004: notes is not part of it" in out
    assert f"owned by {lease.owner}" in out
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 1
    sums = FileSum(3000, sum_of(last / "data").crc32c)
    said = (
        f"step-00000002: data is damaged: it has CRC-32C {sum_of(flipped).crc32c}, and was written with {sums.crc32c}"
    )
    assert said in capsys.readouterr().out
    lease.release()
    ended = f"{identity().rpartition(' ')[0]} 4194305"
    take(Output("the folder", tmp_path), replace(Owner.here("theirs"), process=ended))
    assert main(["checkpoints", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^owned by run theirs, .*, which has ended: the next run takes the folder$", out, re.MULTILINE)
    assert "step-00000004: newest: a run goes on from here" in out
    (tmp_path / ".lease-000099").write_text("")
    (last / "data").unlink()
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000002" / "trainer.json").write_text("{}")
    assert main(["checkpoints", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "step-00000004: data: No such file or directory" in out
    assert "no: it has no trainer.json" in out
    assert "step-00000002 cannot be read (trainer.json: KeyError" in out
    assert f"the lease {tmp_path}/.lease-000099 cannot be understood (it is empty)" in out
    assert "newest: a run" not in out, "none goes on from what is damaged"


def test_one_checkpoint_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(add(tmp_path, 1)), "--verify"]) == 0
    _, only = capsys.readouterr().out.splitlines()
    assert only.split()[:2] == ["step-00000001", "1"]


def test_no_folder_and_no_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} has no checkpoints\n"
    assert main(["checkpoints", str(tmp_path / "nothing")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainclient: the folder {tmp_path}/nothing cannot be read (No such file or directory)")
    assert main(["checkpoints"]) == 2


NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder takes root to make")
def test_what_another_user_hides_is_named_where_it_could_be_a_checkpoint() -> None:
    """A disk's lost+found is none; its other folders are listed all the same."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        for step in (1, 2, 3):
            add(folder, step)
        (folder / "lost+found").mkdir()
        for hidden in ("lost+found", "step-00000002", "step-00000003/trainer.json"):
            (folder / hidden).chmod(0)
        (folder / "said").touch()
        (folder / "said").chmod(0o666)
        process = forks().Process(target=list_as_nobody, args=(folder,))
        process.start()
        process.join(60)
        assert process.exitcode == 1
        rows = (folder / "said").read_text().splitlines()[1:]
    assert [row.split()[0] for row in rows[:3]] == [f"step-{step:08d}" for step in (1, 2, 3)]
    assert "sizes fit" in rows[0]
    assert all("no: see below" in row for row in rows[1:3])
    assert sum("cannot be read (trainer.json: Permission denied)" in row for row in rows[3:]) == 2
    assert not [row for row in rows if "lost+found" in row]


def list_as_nobody(folder: Path) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with (folder / "said").open("w") as said, redirect_stdout(said):
        code = main(["checkpoints", str(folder)])
    os._exit(code)
