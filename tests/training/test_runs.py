"""Whole runs: resuming, losing a process, stopping, refusals."""

import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli.server_process import SAYS, serving
from parallel.conftest import Fleet
from parallel.runtime_cases import Degrees
from training.runs import TIMEOUT_S, Run, descendants, kill_tree, read_until

FIRST = Degrees(1, 1, 2, 1)
SECOND = Degrees(2, 2, 1, 1)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def assert_same_steps(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same samples step by step, and losses that differ by rounding only."""
    assert [m["step"] for m in found] == [m["step"] for m in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("samples", "sample_digest", "images"):
            assert ours[name] == theirs[name]
        for name in ("text_loss", "image_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), (name, ours["step"])


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of the first steps of a run that nothing happens to."""
    run = Run(fleet.address, tmp_path_factory.mktemp("undisturbed"))
    code, errors = run.train(FIRST, "--steps", "5")
    assert code == 0, errors
    assert len(run.metrics()) == 5
    return run.metrics()


def test_resume_after_every_step_in_either_layout(
    fleet: Fleet, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    run = Run(fleet.address, tmp_path)
    for end, degrees in ((1, FIRST), (2, FIRST), (3, SECOND), (4, SECOND), (5, FIRST)):
        code, errors = run.train(degrees, "--steps", str(end))
        assert code == 0, errors
    assert_same_steps(run.metrics(), undisturbed)
    kept = sorted(path.name for path in run.checkpoints.iterdir())
    assert kept == [f"step-{step:08d}" for step in (3, 4, 5)]


def test_killed_process_ends_the_run_and_it_resumes(
    fleet: Fleet, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    run = Run(fleet.address, tmp_path)
    process = run.start(run.command(SECOND))
    try:
        read_until(process, "step 2/")
        ranks = descendants(process)
        assert len(ranks) == SECOND.world_size
        ranks[3].kill()
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1
        assert "trainclient: rank 3 was killed by SIGKILL" in errors.splitlines()
        psutil.wait_procs(ranks, timeout=TIMEOUT_S)
        assert not any(rank.is_running() for rank in ranks)
    finally:
        kill_tree(process)
    done = len(run.metrics())
    code, errors = run.train(FIRST, "--steps", str(done + 1))
    assert code == 0, errors
    steps = [m["step"] for m in run.metrics()]
    assert steps[-1] == done
    assert set(steps) == set(range(done + 1))
    by_step = {m["step"]: m for m in run.metrics()}
    assert_same_steps([by_step[step] for step in range(min(done + 1, 5))], undisturbed[: done + 1])


def test_killed_server_changes_nothing(fleet: Fleet, tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    arguments = ["--dataset", f"pairs={fleet.folders['pairs']}"]
    with serving(*arguments) as one, serving(*arguments) as other:
        run = Run(f"{one.address},{other.address}", tmp_path)
        process = run.start(run.command(FIRST, "--steps", "5"))
        try:
            read_until(process, "step 1/")
            one.process.kill()
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            kill_tree(process)
    assert process.returncode == 0, errors
    assert_same_steps(run.metrics(), undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_ends(fleet: Fleet, tmp_path: Path, number: signal.Signals) -> None:
    run = Run(fleet.address, tmp_path)
    process = run.start(run.command(Degrees(1, 1, 1, 1), "--checkpoint.every", "1000"))
    try:
        read_until(process, "step 1/")
        ranks = descendants(process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 128 + number, errors
        assert not any(rank.is_running() for rank in ranks)
    finally:
        kill_tree(process)
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1] == f"trainclient: stopped by {number.name}"
    (saved,) = run.checkpoints.iterdir()
    assert saved.name == f"step-{len(run.metrics()):08d}"


def test_signal_while_ranks_are_started_leaves_none(fleet: Fleet, tmp_path: Path) -> None:
    """Torch forgets the processes that it has started when a signal interrupts it in starting the others."""
    run = Run(fleet.address, tmp_path)
    process = run.start(run.command(Degrees(2, 2, 2, 2)))
    try:
        while not (ranks := psutil.Process(process.pid).children()):
            assert process.poll() is None
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT_S)
        left = [p for p in psutil.process_iter(["cmdline"]) if str(run.checkpoints) in (p.info["cmdline"] or [])]
    finally:
        kill_tree(process)
    for rank in left:
        rank.kill()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert not left
    assert not any(rank.is_running() for rank in ranks)


def test_lost_launcher_ends_the_processes(fleet: Fleet, tmp_path: Path) -> None:
    run = Run(fleet.address, tmp_path)
    process = run.start(run.command(Degrees(1, 1, 1, 1)))
    try:
        read_until(process, "step 1/")
        ranks = descendants(process)
        process.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=TIMEOUT_S)
        assert len(gone) == 3
        assert not alive
    finally:
        kill_tree(process)


def test_interrupt_before_there_are_ranks_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(TIMEOUT_S)
        run = Run(f"127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        process = run.start(run.command(Degrees(1, 1, 1, 1)))
        try:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=TIMEOUT_S)
            connection.close()
        finally:
            kill_tree(process)
    assert process.returncode == 130
    assert [line for line in errors.splitlines() if not SAYS.match(line)] == ["trainclient: interrupted"]


def test_refusals(fleet: Fleet, tmp_path: Path) -> None:
    """Another stream, other models, too many bad images: one line each, and nothing is trained."""
    degrees = Degrees(1, 1, 1, 1)
    run = Run(fleet.address, tmp_path)
    assert run.train(degrees, "--steps", "1")[0] == 0
    code, errors = run.train(degrees, "--steps", "2", stream={"seed": 8})
    assert code == 2
    assert len(errors.splitlines()) == 2
    assert "seed: 8 here, 7 there" in errors
    code, errors = run.train(degrees, "--steps", "2", "--encoder.layers", "3")
    assert code == 2
    assert len(errors.splitlines()) == 2
    assert "vit.layers: 3 here, 2 there" in errors
    assert len(run.metrics()) == 1
    broken = Run(fleet.address, tmp_path / "broken")
    code, errors = broken.train(degrees, "--max-invalid-ratio", "0", stream={"dataset": "understanding"})
    assert code == 1
    assert len(errors.splitlines()) == 2
    assert "1 of 23 images up to step 0 could not be decoded" in errors
    assert not (broken.folder / "metrics.jsonl").read_text()
