"""Whole runs: resuming, losing a process, stopping, refusals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
import yaml
from cli.server_process import SAYS, serving
from disttrain.v1 import admin_service_pb2
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from faults.disk import missing, small_disk
from program.conftest import Fleet
from program.runtime_cases import Degrees, job_data
from training.runs import TIMEOUT_S, Run, descendants, kill_tree, read_until, stored, variables

from dataserver.planning.simulation import OperationKind
from trainclient.checkpoint.state import read_manifest

FIRST = Degrees(2, 2, 1, 2, colocated=True)
SECOND = Degrees(2, 2, 1, 1)
ALONE = Degrees(1, 1, 1, 1, colocated=True)
"""One process, where nothing is asked of several: each costs seconds to start."""
TENSOR_PARALLEL = Degrees(1, 1, 1, 1, tp=(1, 2, 1))
GROUPED = Degrees(1, 2, 1, 1, group=2)
SCHEDULE = ("--optimizer.schedule", "cosine", "--optimizer.decay-steps", "3", "--optimizer.warmup-steps", "2")

SHARES = ("--encoder.sharding", "zero3", "--backbone.sharding", "zero2")

# So long that nothing but a hang takes it: the first test of a process waits for servers, and kernels to be compiled.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * TIMEOUT_S)]


def assert_same_steps(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same samples step by step, and losses that differ by rounding only."""
    assert [m["step"] for m in found] == [m["step"] for m in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("samples", "sample_digest", "images", "tokens", "flops", "lr"):
            assert ours[name] == theirs[name]
        for name in ("text_loss", "image_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), (name, ours["step"])


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The first steps of a run that nothing happens to; one of them is recorded, and two are evaluated."""
    run = Run(fleet.address, tmp_path_factory.mktemp("undisturbed"))
    held_out = run.folder / "held_out.yaml"
    held_out.write_text(yaml.safe_dump(job_data(FIRST, dataset="more")))
    recorded = ("--timeline.directory", str(run.folder / "timeline"), "--timeline.first", "3")
    evaluated = ("--evaluation.job", str(held_out), "--evaluation.every", "2", "--evaluation.steps", "1")
    code, errors = run.train(FIRST, "--steps", "5", "--peak-tflops", "0.01", *recorded, *evaluated, *SCHEDULE)
    assert code == 0, errors
    assert errors.count("timeline of step 3: ") == 1
    said = re.findall(r"^(module|vit|llm|dit|modules share devices|step 1 should take)\b", errors, re.MULTILINE)
    assert said == ["module", "vit", "llm", "dit", "modules share devices", "step 1 should take"]
    assert len(run.metrics()) == 5
    return run


def test_metrics_say_what_was_computed(undisturbed: Run) -> None:
    for m in undisturbed.metrics():
        assert m["tokens_per_second"] == pytest.approx(m["tokens"] / m["seconds"])
        assert m["images_per_second"] == pytest.approx(m["images"] / m["seconds"])
        assert m["mfu_percent"] == pytest.approx(100 * m["flops"] / m["seconds"] / (0.01e12 * FIRST.world_size))
        assert m["flops"] > m["tokens"] > 0


def test_a_run_needs_no_temporary_folder(undisturbed: Run) -> None:
    """Where it makes nothing there, it can do without one; and nothing is left behind."""
    assert list(undisturbed.temporary.iterdir()) == []


NO_TEMPORARY_FOLDER = """import tempfile
def none():
    raise FileNotFoundError("no usable temporary folder")
tempfile._get_default_tempdir = none
"""


@pytest.mark.long
def test_a_run_without_temporary_folder_and_with_all_descriptors_closed(fleet: Fleet, tmp_path: Path) -> None:
    """It trains, as files and sockets that it opens get other numbers; a refusal is its exit status alone."""
    run = Run(fleet.address, tmp_path)
    (tmp_path / "sitecustomize.py").write_text(NO_TEMPORARY_FOLDER)
    environment = variables()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    for options, code in ((("--steps", "1"), 0), (("--steps", "0"), 2)):
        line = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *run.command(ALONE, *options)]
        assert subprocess.run(line, env=environment, timeout=TIMEOUT_S, check=False).returncode == code
    assert len(run.metrics()) == 1


def test_every_second_step_is_evaluated(undisturbed: Run) -> None:
    found = [m["evaluation"] for m in undisturbed.metrics()]
    assert [m is not None for m in found] == [False, True, False, True, False]
    assert found[1]["sample_digest"] == found[3]["sample_digest"]
    assert found[1]["text_loss"] != found[3]["text_loss"] > 0


def test_a_recorded_step_has_a_trace_and_a_table(undisturbed: Run) -> None:
    folder = undisturbed.folder / "timeline"
    assert {path.name for path in folder.iterdir()} == {"step-00000003.json", "step-00000003.txt"}
    events = json.loads((folder / "step-00000003.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    places = ("vit + llm + dit rank 0", "vit + llm + dit rank 1")
    assert list(threads.values()) == [f"{place}, {what}" for place in places for what in ("planned", "measured")]
    kinds = [kind.value for kind in OperationKind]
    runs = {t: [e for e in events if e.get("cat") in kinds and e["tid"] == t] for t in threads}
    for planned, measured in ((runs[t], runs[t + 1]) for t in threads if t % 2 == 0):
        assert [e["name"] for e in planned] == [e["name"] for e in measured]
        assert [measured[0]["name"], measured[-1]["name"]] == ["unshard", "reduce"]
        assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in pairwise(measured))
    table = (folder / "step-00000003.txt").read_text()
    assert all(place in table for place in places)


@pytest.mark.parametrize(
    "runs",
    [
        ((2, TENSOR_PARALLEL), (5, FIRST)),
        ((1, FIRST), (2, FIRST), (3, SECOND), (4, SECOND), (5, FIRST)),
    ],
    ids=["some", "every"],
)
@pytest.mark.long
def test_resume_after_steps_in_either_layout(
    fleet: Fleet, tmp_path: Path, undisturbed: Run, runs: tuple[tuple[int, Degrees], ...]
) -> None:
    run = Run(fleet.address, tmp_path)
    for end, degrees in runs:
        code, errors = run.train(degrees, "--steps", str(end), *SCHEDULE, *(SHARES if end % 2 else ()))
        assert code == 0, errors
    assert_same_steps(run.metrics(), undisturbed.metrics())
    kept = sorted(path.name for path in run.checkpoints.iterdir())
    assert kept == [f"step-{step:08d}" for step in (3, 4, 5)]


@pytest.mark.parametrize(
    "degrees",
    [FIRST, *(pytest.param(degrees, marks=pytest.mark.long) for degrees in (TENSOR_PARALLEL, GROUPED))],
    ids=str,
)
def test_killed_process_ends_the_run_and_it_resumes_in_another_layout(
    fleet: Fleet, tmp_path: Path, undisturbed: Run, degrees: Degrees
) -> None:
    run, lost = Run(fleet.address, tmp_path), min(2, degrees.world_size - 1)
    shares = ("--backbone.sharding", "zero3") if degrees.group else ()
    process = run.start_forked(run.command(degrees, "--checkpoint.no-asynchronous", *SCHEDULE, *shares))
    try:
        read_until(process, "step 2/")
        ranks = descendants(process)
        assert len(ranks) == degrees.world_size
        ranks[lost].kill()
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1
        ended = re.compile(rf"trainclient: global rank {lost} \(.*\) ended; .* Its last: \w.* The others: ")
        assert any(map(ended.match, errors.splitlines()))
        killed = f"trainclient: rank {lost} was killed by SIGKILL: by the others if it was stopped, by the system"
        assert any(line.startswith(killed) for line in errors.splitlines())
        psutil.wait_procs(ranks, timeout=TIMEOUT_S)
        assert not any(rank.is_running() for rank in ranks)
    finally:
        kill_tree(process)
    done, other = len(run.metrics()), SECOND if degrees.colocated else FIRST
    code, errors = run.train(other, "--steps", str(done + 1), *SCHEDULE, *SHARES)
    assert code == 0, errors
    assert [m["step"] for m in run.metrics()] == list(range(done + 1))
    assert_same_steps(run.metrics()[:5], undisturbed.metrics()[: done + 1])


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_signal_saves_and_ends(
    fleet: Fleet, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may take long on a busy machine: the run has the time that it is given, not what torch's launcher gives.

    That is nothing here, and 30 s otherwise.
    """
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0")
    run = Run(fleet.address, tmp_path)
    process = run.start_forked(run.command(FIRST, "--checkpoint.every", "1000", "--stop-grace-s", str(TIMEOUT_S)))
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


def open_jobs(address: str) -> set[str]:
    """The jobs that a server has open streams of."""
    with grpc.insecure_channel(address) as channel:
        found = AdminServiceStub(channel).GetMetrics(admin_service_pb2.GetMetricsRequest(), timeout=TIMEOUT_S)
    return {rank.job for rank in found.ranks}


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_signal_ends_an_evaluation_after_the_step_in_hand(fleet: Fleet, tmp_path: Path) -> None:
    """The run that resumes makes up for it."""
    degrees, run, held_out = Degrees(1, 1, 1, 1), Run(fleet.address, tmp_path), tmp_path / "held_out.yaml"
    held_out.write_text(yaml.safe_dump(job_data(degrees, dataset="more", end={"steps": 100_000})))
    process = run.start(run.command(degrees, "--evaluation.job", str(held_out), "--evaluation.every", "1"))
    try:
        while len(open_jobs(fleet.address)) < 2:  # that of the held-out stream has begun, and does not end
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        kill_tree(process)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert [(m["step"], m["evaluation"]) for m in run.metrics()] == [(0, None)]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]

    evaluated = ("--evaluation.job", str(held_out), "--evaluation.every", "1", "--evaluation.steps", "2")
    undisturbed = Run(fleet.address, tmp_path / "undisturbed")
    for again, steps in ((run, "1"), (run, "2"), (undisturbed, "2")):
        code, errors = again.train(degrees, "--steps", steps, *evaluated)
        assert code == 0, errors
        if steps == "1":  # without a step that would save
            assert read_manifest(run.checkpoints / "step-00000001").state.unevaluated is None
    for ours, theirs in zip(run.metrics(), undisturbed.metrics(), strict=True):
        assert ours["evaluation"] | {"seconds": 0} == theirs["evaluation"] | {"seconds": 0}


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
    process = run.start_forked(run.command(ALONE))
    try:
        read_until(process, "step 1/")
        ranks = descendants(process)
        process.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=TIMEOUT_S)
        assert len(gone) == 1
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
    """Another stream, other models, another run's metrics, too many bad images: one line each, nothing is trained."""
    run = Run(fleet.address, tmp_path)
    assert run.train(ALONE, "--steps", "1")[0] == 0
    code, errors = run.train(ALONE, "--steps", "2", stream={"seed": 8})
    assert code == 2
    assert len(errors.splitlines()) == 2
    assert "seed: 8 here, 7 there" in errors
    code, errors = run.train(ALONE, "--steps", "2", "--encoder.layers", "3")
    assert code == 2
    assert len(errors.splitlines()) == 2
    assert "vit.layers: 3 here, 2 there" in errors
    assert len(run.metrics()) == 1
    lines = (run.folder / "metrics.jsonl").read_text()
    other = Run(fleet.address, tmp_path)
    code, errors = other.train(ALONE, "--steps", "2", "--checkpoint.directory", str(tmp_path / "c"), "--seed", "1")
    assert code == 2
    assert len(errors.splitlines()) == 2
    assert re.search(r"metrics.jsonl is of another run: \w{16} in line 1, and this is \w{16}; give --metrics", errors)
    assert (run.folder / "metrics.jsonl").read_text() == lines
    broken = Run(fleet.address, tmp_path / "broken")
    quiet = ("--no-progress", "--max-invalid-ratio", "0")
    code, errors = broken.train(ALONE, *quiet, stream={"dataset": "understanding"})
    assert code == 1
    assert len(errors.splitlines()) == 2
    assert "1 of 23 images up to step 0 could not be decoded" in errors
    assert not (broken.folder / "metrics.jsonl").read_text()


@pytest.mark.long
def test_torchrun_starts_a_run_again_and_it_goes_on_from_the_last_checkpoint(
    fleet: Fleet, tmp_path: Path, undisturbed: Run
) -> None:
    """It dies before the first checkpoint, and after it, having lost a server in between.

    Its metrics have each step once, and its end is the same.
    """
    served = ["--dataset", f"pairs={fleet.folders['pairs']}"]
    with serving(*served) as one, serving(*served) as other:
        run = Run(f"{one.address},{other.address}", tmp_path)
        command = run.command(FIRST, "--steps", "5", "--checkpoint.every", "3", *SCHEDULE)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(FIRST.world_size)]
        process = run.start([*torchrun, "--max-restarts", "2", *command[1:]])
        try:
            read_until(process, "step 2/")
            descendants(process)[1].kill()
            read_until(process, "step 3/")
            one.process.kill()
            read_until(process, "step 4/")
            descendants(process)[1].kill()
            _, errors = process.communicate(timeout=2 * TIMEOUT_S)
        finally:
            kill_tree(process)
    assert process.returncode == 0, errors
    assert_same_steps(run.metrics(), undisturbed.metrics())
    last = stored(run.checkpoints / "step-00000005")
    for name, tensor in stored(undisturbed.checkpoints / "step-00000005").items():
        assert torch.equal(tensor, last[name]), name


@pytest.mark.long
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_full_disk_ends_the_run_with_one_error(fleet: Fleet, tmp_path: Path) -> None:
    run = Run(fleet.address, tmp_path)
    with small_disk(tmp_path / "disk") as disk:
        options = ("--steps", "500", "--checkpoint.directory", str(disk))
        code, errors = run.train(ALONE, *options)
        assert list(disk.iterdir()) == []
    assert code == 1
    _, error = (line for line in errors.splitlines() if not line.startswith("step "))
    assert re.match(r"trainclient: the checkpoint \S+/step-\d{8} cannot be written \(.*No space left on device", error)
    assert len(run.metrics()) < 500
