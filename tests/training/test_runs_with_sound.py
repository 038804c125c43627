"""A run on videos with their sound as a second modality: it learns, resumes, and every encoder is trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders.three_encoders import three_encoders
from cli.forked import run_forked
from cli.server_process import serving
from program.runtime_cases import Degrees
from serving.harness import job_data
from training.runs import TIMEOUT_S, Run, stored, variables
from video.heard import write_heard

pytest.importorskip("av", reason="the extra video is not installed")
pytest.importorskip("soundfile", reason="the extra audio is not installed")
pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * TIMEOUT_S)]
STEPS = 6


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_heard(tmp_path_factory.mktemp("heard"), 24)
    with serving("--dataset", f"heard={folder}") as server:
        yield server.address


def job_with_sound(**degrees: int) -> dict[str, Any]:
    """Pictures, the sound of videos, and their frames, beside one backbone."""
    return job_data(
        **three_encoders(**degrees),
        datasets=[{"name": "heard"}],
        seq_len=256,
        global_batch=4,
        microbatch=1,
        end={"steps": 100},
    )


def trained(run: Run, steps: int, **degrees: int) -> None:
    """Train up to a step, from where the run's folder has come to."""
    words = run.command(Degrees(1, 1, 1, 0), "--steps", str(steps))[2:]
    (run.folder / "job.yaml").write_text(yaml.safe_dump(job_with_sound(**degrees)))
    done = run_forked(words, run.folder, variables(), TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_a_run_on_videos_with_sound_learns_and_resumes(heard: str, tmp_path: Path) -> None:
    whole, parted = Run(heard, tmp_path / "whole"), Run(heard, tmp_path / "parted")
    trained(whole, STEPS, vit=1, ears=1, eyes=1, llm=1)
    trained(parted, 2, vit=1, ears=1, eyes=1, llm=1)
    first = stored(parted.checkpoints / "step-00000002")
    trained(parted, STEPS, vit=1, ears=2, eyes=1, llm=2)
    steps, resumed = whole.metrics(), parted.metrics()
    assert [m["step"] for m in resumed] == [m["step"] for m in steps] == [*range(STEPS)]
    for ours, theirs in zip(resumed, steps, strict=True):
        assert ours["sample_digest"] == theirs["sample_digest"]
        assert ours["text_loss"] == pytest.approx(theirs["text_loss"], rel=1e-9)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-9)
    assert steps[-1]["text_loss"] < 0.9 * steps[0]["text_loss"]
    last = stored(parted.checkpoints / f"step-{STEPS:08}")
    changed = {name.split(".")[0] for name, before in first.items() if not torch.equal(before, last[name])}
    assert {"vit", "ears", "eyes", "llm"} <= changed
