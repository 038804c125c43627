"""Runs on GPUs take the steps of the same runs on CPUs: every layout, over NCCL, with every way to hold parameters."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from gpu.shared_gpu import train_over_nccl
from program.conftest import Fleet
from program.runtime_cases import Degrees
from training.runs import TIMEOUT_S, Run, variables
from training.test_contrastive_runs import CONFIG, JOB

STEPS = 3
ALONE = Degrees(1, 1, 1, 1, colocated=True)
"""One process with all modules."""
NOISE = 1e-6
"""Relative difference of losses: a GPU's noise for diffusion differs from a CPU's by two units in the last place."""
HALF = 0.02
"""The same, of bfloat16 from float32."""

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


def assert_near(
    found: Run, expected: Run, bound: float, names: tuple[str, ...] = ("text_loss", "image_loss", "grad_norm")
) -> None:
    ours, theirs = found.metrics(), expected.metrics()
    assert [m["step"] for m in ours] == [m["step"] for m in theirs] == list(range(STEPS))
    for step, reference in zip(ours, theirs, strict=True):
        assert step["sample_digest"] == reference["sample_digest"]
        for name in names:
            assert step[name] == pytest.approx(reference[name], rel=bound), (name, step["step"])


CASES = {
    "pipeline": (Degrees(1, 1, 1, 1), ()),
    "pipeline-never-by-host": (Degrees(1, 1, 1, 1), ("--rows-by-host", "never")),
    "alone": (ALONE, ()),
    "stages": (Degrees(1, 2, 2, 1), ()),
    "interleaved-zero2": (Degrees(2, 1, 2, 1, chunks=2), ("--encoder.sharding", "zero2")),
    "recomputed-zero3": (Degrees(1, 2, 1, 1, recompute=("llm",)), ("--backbone.sharding", "zero3")),
    "colocated-zero3": (
        Degrees(2, 2, 1, 2, colocated=True),
        ("--backbone.sharding", "zero3", "--encoder.sharding", "zero2"),
    ),
    "tensor-parallel": (Degrees(1, 1, 1, 1, tp=(1, 2, 2)), ()),
    "sequence-parallel": (Degrees(1, 1, 2, 1, sp=2), ()),
    "groups": (Degrees(1, 2, 1, 1, group=2), ()),
    "frozen": (Degrees(1, 2, 1, 1, frozen=("vit",)), ()),
}
"""By names that `scripts/gpu_check` calls; one pipeline alone comes first."""


@pytest.mark.parametrize(("degrees", "options"), CASES.values(), ids=CASES)
def test_a_gpu_takes_the_steps_of_a_cpu(
    fleet: Fleet, tmp_path: Path, degrees: Degrees, options: tuple[str, ...]
) -> None:
    here, there = Run(fleet.address, tmp_path / "cpu"), Run(fleet.address, tmp_path / "gpu")
    with ThreadPoolExecutor(1) as beside:
        reference = beside.submit(here.train, degrees, "--device", "cpu", "--steps", str(STEPS), *options)
        train_over_nccl(there.command(degrees, "--steps", str(STEPS), *options), degrees.world_size, there.folder)
        code, errors = reference.result()
    assert code == 0, errors
    assert_near(there, here, NOISE)


def test_towers_take_the_steps_of_a_cpu(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(CONFIG))
    here, there = Run(fleet.address, tmp_path / "cpu"), Run(fleet.address, tmp_path / "gpu")
    command = [sys.executable, "-m", "trainclient", "train", "--servers", fleet.address, "--steps", str(STEPS)]
    command += ["--job", str(tmp_path / "job.yaml"), "--config", str(tmp_path / "train.yaml"), "--dtype", "float64"]
    for run in (here, there):
        run.folder.mkdir()
    on_cpus = [*command, "--metrics", str(here.folder / "metrics.jsonl"), "--device", "cpu"]
    done = subprocess.run(on_cpus, env=variables(), stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    train_over_nccl([*command, "--metrics", str(there.folder / "metrics.jsonl")], 3, there.folder)
    assert_near(there, here, NOISE, ("contrastive_loss", "grad_norm"))


@pytest.mark.parametrize("options", [(), ("--compile",)], ids=["eager", "compiled"])
def test_bfloat16_is_near_float32(fleet: Fleet, tmp_path: Path, options: tuple[str, ...]) -> None:
    half, full = Run(fleet.address, tmp_path / "half"), Run(fleet.address, tmp_path / "full")
    for run, dtype in ((full, ("float32",)), (half, ("bfloat16", *options))):
        train_over_nccl(run.command(ALONE, "--steps", str(STEPS), "--dtype", *dtype), 1, run.folder)
    assert_near(half, full, HALF)
