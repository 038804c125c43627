"""Hugging Face's Trainer over the stream: the example of the documentation, as it stands, in real processes."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapters.whole_jobs import tiny_model, whole_job
from training.runs import kill_tree
from transformers import TrainingArguments

from trainclient.adapters.huggingface import STATE_FILE, ServedTrainer
from trainclient.adapters.qwen2_vl import Qwen2VLInputs
from trainclient.adapters.whole_rank import WholeRankStream

DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"
STEPS = 6
TIMEOUT_S = 150


def example() -> str:
    """The script in the documentation, which is no longer than 30 lines."""
    (found,) = re.findall(r"```python\n(.*?ServedTrainer.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found.count("\n") <= 30
    return str(found)


@dataclass
class Run:
    """Where a run reads and writes."""

    server: str
    model: Path
    folder: Path

    def start(self, ranks: int) -> "subprocess.Popen[str]":
        self.folder.mkdir(parents=True, exist_ok=True)
        script, job = self.folder / "train.py", self.folder / "job.yaml"
        script.write_text(example())
        job.write_text(yaml.safe_dump(whole_job(ranks, {"steps": STEPS})))
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return subprocess.Popen(
            [*line, str(script), self.server, str(job), str(self.model), str(self.out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def finish(self, ranks: int) -> dict[int, float]:
        """Run to the end; the loss of each step."""
        process = self.start(ranks)
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            kill_tree(process)
        assert process.returncode == 0, errors[-3000:]
        return self.losses(STEPS)

    def losses(self, step: int) -> dict[int, float]:
        """Of all steps, as a checkpoint has them."""
        state = json.loads((self.out / f"checkpoint-{step}" / "trainer_state.json").read_text())
        return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}

    @property
    def out(self) -> Path:
        return self.folder / "out"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_two_processes_train_as_one(server: str, model: Path, tmp_path: Path) -> None:
    alone, together = (Run(server, model, tmp_path / str(ranks)).finish(ranks) for ranks in (1, 2))
    assert list(alone) == list(range(1, STEPS + 1))
    assert alone == pytest.approx(together, rel=2e-3)


@pytest.mark.long
def test_killed_and_resumed_twice_once_with_another_number_of_processes(
    server: str, model: Path, tmp_path: Path
) -> None:
    undisturbed = Run(server, model, tmp_path / "undisturbed").finish(2)
    run = Run(server, model, tmp_path / "killed")
    for ranks, step in ((2, 2), (1, 4)):
        process = run.start(ranks)
        try:
            while not (run.out / f"checkpoint-{step}" / STATE_FILE).exists():
                assert process.poll() is None, process.communicate()[1][-3000:]
                time.sleep(0.01)
        finally:
            kill_tree(process)
    assert run.finish(2) == pytest.approx(undisturbed, rel=2e-3)


def trainer(server: str, model: Path, folder: Path, ranks: int = 1, **arguments: Any) -> ServedTrainer:
    from transformers import AutoModelForImageTextToText

    network = AutoModelForImageTextToText.from_pretrained(model)
    stream = WholeRankStream(server, whole_job(ranks, {"steps": STEPS}), rank=0, world_size=ranks)
    options = {"num_train_epochs": 1, "report_to": "none", "use_cpu": True, **arguments}
    inputs = Qwen2VLInputs.of(network.config, stream.job.stream.sizing)
    try:
        return ServedTrainer(network, TrainingArguments(str(folder), **options), stream=stream, inputs=inputs)
    finally:
        stream.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps is 2.*leave it at 1"),
        ({"max_steps": STEPS + 1}, r"ends after 6 steps, and max_steps is 7.*execution\.end"),
        ({"num_train_epochs": 3}, r"num_train_epochs 3.*to 1"),
        ({"average_tokens_across_devices": False}, r"average_tokens_across_devices.*leave it at True"),
        ({"fsdp": True}, r"would hang.*data parallelism alone"),
    ],
)
def test_arguments_that_contradict_the_job(
    server: str, model: Path, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        trainer(server, model, tmp_path, **arguments)


def test_checkpoints_without_a_stream(server: str, model: Path, tmp_path: Path) -> None:
    found = trainer(server, model, tmp_path)
    with pytest.raises(ValueError, match="has no checkpoint"):
        found.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match=r"checkpoint-2 says nothing of the stream.*resume from an earlier one"):
        found.train(resume_from_checkpoint=True)
