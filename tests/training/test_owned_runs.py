"""Whole runs over one folder: the second is refused, or takes over, and the first then hurts nothing."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest
from program.conftest import Fleet
from program.runtime_cases import Degrees
from training.runs import TIMEOUT_S, Run, descendants, kill_tree, read_until

from trainclient.checkpoint.state import read_manifest
from trainclient.checkpoint.sums import damages

ALONE = Degrees(1, 1, 1, 1, colocated=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_second_run_is_refused_and_may_take_over(fleet: Fleet, tmp_path: Path) -> None:
    """The first one is stopped while the second trains, and goes on behind it."""
    run = Run(fleet.address, tmp_path)
    process = run.start_forked(run.command(ALONE))
    try:
        read_until(process, "step 2/")
        (rank,) = descendants(process)
        code, errors = run.train(ALONE, "--checkpoint.directory", str(tmp_path / "c"))
        assert code == 2
        owner = rf"run \w{{16}}, process {rank.pid} on {socket.gethostname()}, attempt \w{{8}}, since \d{{4}}-"
        refused = rf"trainclient: the metrics .* belongs to another run: {owner}.* It is alive: wait for it, end it"
        assert re.fullmatch(
            rf"{refused}.*take over with --take-over; or give another --\S+", errors.splitlines()[-1]
        ), errors
        assert not (tmp_path / "c").exists()
        os.kill(rank.pid, signal.SIGSTOP)
        done = len(run.metrics())
        code, errors = run.train(ALONE, "--steps", str(done + 3), "--take-over")
        assert code == 0, errors
        assert f"is taken over from run {read_manifest(newest(run)).state.run}, process {rank.pid}" in errors
        lines, there = (run.folder / "metrics.jsonl").read_bytes(), listed(run)
        os.kill(rank.pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        kill_tree(process)
    assert process.returncode == 1
    lost = re.compile(
        r"trainclient: .*(was taken over from this run by another one|is gone, so another run may own it)"
    )
    assert any(map(lost.match, errors.splitlines())), errors
    assert "Traceback" not in errors
    assert (run.folder / "metrics.jsonl").read_bytes() == lines
    assert [m["step"] for m in run.metrics()] == list(range(done + 3))
    assert listed(run) == there
    assert newest(run).name == f"step-{done + 3:08d}"
    for path in run.checkpoints.iterdir():
        assert damages(path, read_manifest(path).files or {}) == []


@pytest.mark.parametrize(
    "names", [("timeline",), pytest.param(("timeline", "profile"), marks=pytest.mark.long)], ids=" and ".join
)
def test_two_runs_do_not_write_timelines_or_profiles_into_one_folder(
    fleet: Fleet, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """They share nothing else. The second one is refused, and writes nothing."""
    first, second = (Run(fleet.address, tmp_path / name) for name in ("first", "second"))
    shared = {name: tmp_path / f"{name}s" for name in names}
    options = {n: (f"--{n}.directory", str(folder), f"--{n}.first", "0") for n, folder in shared.items()}
    process = first.start_forked(first.command(ALONE, *(word for words in options.values() for word in words)))
    try:
        read_until(process, "step 2/")
        (rank,) = descendants(process)
        for name, folder in shared.items():
            written = sorted((path.name, path.stat().st_ino) for path in folder.iterdir())
            assert len(written) >= 2, "a lease, and what the first run has recorded"
            code, errors = second.train(ALONE, *options[name], "--steps", "2")
            assert code == 2
            refusal = errors.splitlines()[-1]
            assert refusal.startswith(f"trainclient: the folder of {name}s {folder} belongs to another run: run "), (
                errors
            )
            assert f"process {rank.pid} on {socket.gethostname()}" in refusal
            assert refusal.endswith(f"take over with --take-over; or give another --{name}.directory")
            assert "Traceback" not in errors
            assert sorted((path.name, path.stat().st_ino) for path in folder.iterdir()) == written
    finally:
        kill_tree(process)
        process.communicate(timeout=TIMEOUT_S)


def newest(run: Run) -> Path:
    return max(run.checkpoints.glob("step-*"))


def listed(run: Run) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_ino) for path in run.checkpoints.iterdir() if "partial" not in path.name)
