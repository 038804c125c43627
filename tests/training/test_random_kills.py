"""Runs whose processes are killed at random moments, and which torchrun starts again, come to the same end."""

import contextlib
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from program.conftest import Fleet
from program.runtime_cases import Degrees
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from training.runs import Run, descendants, kill_tree

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
DEGREES = Degrees(1, 1, 2, 1)
KILLS = 10
STEPS = 60
OPTIONS = ("--steps", str(STEPS), "--checkpoint.every", "3", "--dtype", "float32", "--optimizer.lr", "0.001")
TIMEOUT_S = 1200


def lines(run: Run) -> int:
    file = run.folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_at_random(run: Run, process: subprocess.Popen[str], seed: int) -> int:
    """Kill one process after the other, within steps and saves, and soon after a restart; the number of kills."""
    moments, killed = random.Random(seed), 0
    targets = sorted(moments.sample(range(1, STEPS - 5), KILLS - KILLS // 3))
    while process.poll() is None and killed < KILLS:
        soon = killed % 3 == 2
        while not soon and process.poll() is None and lines(run) < targets[0]:
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 10 if soon else 0.5))
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):  # they were just ending, or starting
            if ranks := descendants(process):
                moments.choice(ranks).kill()
                killed += 1
                targets = targets if soon else targets[1:]
    return killed


def saved(run: Run) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's state in the newest checkpoint."""
    path = run.checkpoints / f"step-{STEPS:08d}"
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in stored.items() if hasattr(m, "size")}
    load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def test_ten_kills_leave_every_bit_as_it_is(fleet: Fleet, tmp_path: Path) -> None:
    undisturbed, run = Run(fleet.address, tmp_path / "undisturbed"), Run(fleet.address, tmp_path / "run")
    process = undisturbed.start(undisturbed.command(DEGREES, *OPTIONS))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "--max-restarts", str(2 * KILLS), *run.command(DEGREES, *OPTIONS)[1:]]
    process, seed = run.start(command), random.randrange(1 << 32)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(process.communicate)
        try:
            killed = kill_at_random(run, process, seed)
            _, errors = ended.result(TIMEOUT_S)
        finally:
            kill_tree(process)
    assert killed == KILLS, (seed, errors)
    assert process.returncode == 0, (seed, errors)
    found, expected = run.metrics(), undisturbed.metrics()

    def facts(line: dict[str, Any]) -> list[Any]:
        return [line[name] for name in ("step", "text_loss", "image_loss", "grad_norm", "sample_digest")]

    assert [facts(line) for line in found] == [facts(line) for line in expected], seed
    ours, theirs = saved(run), saved(undisturbed)
    assert ours.keys() == theirs.keys()
    assert any(name.endswith("/exp_avg") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
