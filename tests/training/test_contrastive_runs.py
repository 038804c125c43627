"""`trainclient train` of contrastive towers, as its users start it."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from program.conftest import Fleet
from training.runs import TIMEOUT_S, kill_tree, steps_of

STEPS = 6
JOB: dict[str, Any] = {
    "stream": {
        "datasets": [{"name": "pairs"}],
        "seq_len": 512,
        "global_batch": 16,
        "contrastive_batch": 16,
        "packing": {"enabled": False},
        "sizing": {"patch": 14, "merge": 2, "max_patches": 64},
    },
    "execution": {
        "layout": {"kind": "contrastive", "microbatches": 2},
        "modules": [
            {"name": "image", "kind": "tower", "modality": "image", "dp": 2},
            {"name": "text", "kind": "tower", "modality": "text"},
        ],
        "end": {"steps": STEPS},
    },
}
CONFIG = {
    "contrastive": {"loss": "siglip", "features": 16},
    "encoder": {"preset": "tiny"},
    "backbone": {"preset": "tiny"},
}


def start(fleet: Fleet, folder: Path) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    job, config = folder / "job.yaml", folder / "train.yaml"
    job.write_text(yaml.safe_dump(JOB))
    config.write_text(yaml.safe_dump(CONFIG))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    line += ["-m", "trainclient", "train", "--job", str(job), "--config", str(config), "--servers", fleet.address]
    line += ["--checkpoint.directory", str(folder / "checkpoints"), "--checkpoint.every", "2"]
    line += ["--metrics", str(folder / "metrics.jsonl"), "--threads", "1"]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True)


def finish(fleet: Fleet, folder: Path) -> list[tuple[int, float]]:
    """Run to the end; step and loss of all lines of the metrics."""
    process = start(fleet, folder)
    try:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        kill_tree(process)
    assert process.returncode == 0, errors[-3000:]
    lines = steps_of(folder / "metrics.jsonl")
    return [(line["step"], line["contrastive_loss"]) for line in lines]


@pytest.mark.long
def test_a_killed_run_goes_on_as_if_it_had_not_been(fleet: Fleet, tmp_path: Path) -> None:
    undisturbed = finish(fleet, tmp_path / "undisturbed")
    assert [step for step, _ in undisturbed] == list(range(STEPS))
    killed = tmp_path / "killed"
    process = start(fleet, killed)
    try:
        while not (killed / "checkpoints" / "step-00000002").exists():
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.02)
    finally:
        kill_tree(process)
    assert finish(fleet, killed) == undisturbed
