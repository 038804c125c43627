"""Hugging Face's Trainer over the stream: the example of the documentation, as it stands, in real processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.examples import ExampleRun, calm_and_killed, example
from adapters.test_whole_rank import read
from adapters.whole_jobs import mixed_job, pass_with_parity, tiny_model, whole_job
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments

from trainclient.adapters.huggingface import ServedTrainer
from trainclient.adapters.padded import PaddedShape
from trainclient.adapters.qwen2_vl import Qwen2VLInputs
from trainclient.adapters.whole_rank import WholeMicrobatch, WholeRankStream

STEPS = 6


def run(server: str, model: Path, folder: Path) -> ExampleRun:
    return ExampleRun(example("ServedTrainer"), server, model, folder, lambda ranks: whole_job(ranks, {"steps": STEPS}))


def losses(run: ExampleRun) -> dict[int, float]:
    """Of all steps, as the last checkpoint has them; each is logged with what the rank waited."""
    last = max(run.out.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    state = json.loads((last / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    assert all(0 <= entry["data_wait_s"] < 60 for entry in logged)
    return {entry["step"]: entry["loss"] for entry in logged}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_two_processes_train_as_one(server: str, model: Path, tmp_path: Path) -> None:
    runs = {ranks: run(server, model, tmp_path / str(ranks)) for ranks in (1, 2)}
    for ranks, started in runs.items():
        started.finish(ranks)
    alone, together = map(losses, runs.values())
    assert list(alone) == list(range(1, STEPS + 1))
    assert alone == pytest.approx(together, rel=2e-3)


@pytest.mark.long
def test_sharded_models_train_as_one_where_some_ranks_lack_images(server: str, model: Path, tmp_path: Path) -> None:
    """Without parity, and without what is run in place of images that a rank lacks, these processes wait for ever."""
    alone, sharded = (run(server, model, tmp_path / name) for name in ("alone", "sharded"))
    alone.job = sharded.job = lambda ranks: mixed_job(ranks, {"steps": STEPS})
    sharded.script = sharded.script.replace('report_to="none"', 'report_to="none", fsdp=True')
    assert "fsdp" in sharded.script
    alone.finish(1)
    sharded.finish(2)
    assert list(losses(alone)) == list(range(1, STEPS + 1))
    assert losses(alone) == pytest.approx(losses(sharded), rel=2e-3)
    assert any(m.lacks_images for m in read(server, 2, {"steps": STEPS}, job_of=mixed_job))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_and_resumed_twice_once_with_another_number_of_processes(
    server: str, model: Path, tmp_path: Path
) -> None:
    """Every sample of a pass once, and the losses are those of a run that nobody disturbed."""
    script = example("ServedTrainer")
    calm, killed = calm_and_killed(
        lambda folder: ExampleRun(script, server, model, folder, pass_with_parity), tmp_path, [0, 2, 4]
    )
    assert losses(killed) == pytest.approx(losses(calm), rel=2e-3)


class Rows(nn.Module):
    """Takes padded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Embedding(300, 8)

    def forward(self, token_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor, **_: Any) -> dict[str, Tensor]:
        assert token_ids.shape[0] == 2
        scores = self.text(token_ids) @ self.text.weight.T
        return {"loss": cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch}


class Mixed(ServedTrainer, Seq2SeqTrainer):
    """With another of transformers' Trainers."""


def test_padded_rows_in_another_trainer_that_it_mixes_with(server: str, tmp_path: Path) -> None:
    job = whole_job(1, {"steps": 2}, packing={"enabled": False})
    job["execution"] |= {"microbatch": 2, "modules": [{**m, "padded": True} for m in job["execution"]["modules"]]}
    options = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    with WholeRankStream(server, job, rank=0, world_size=1) as stream:
        shape = PaddedShape.of(stream)

        def inputs(microbatch: WholeMicrobatch, _: torch.device) -> dict[str, Tensor]:
            batch = shape.around(microbatch).pad(microbatch)
            return {name: torch.from_numpy(batch[name]).long() for name in ("token_ids", "labels")}

        found = Mixed(Rows(), Seq2SeqTrainingArguments(str(tmp_path), **options), stream=stream, inputs=inputs)
        found.train()
    logged = [entry for entry in found.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2]
    assert all(0 < entry["loss"] < 20 and entry["data_wait_s"] >= 0 for entry in logged)


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
        ({"accelerator_config": {"dispatch_batches": True}}, r"dispatch_batches.*in unequal shapes: leave both out"),
        ({"ranks": 2}, r"rank 0 of 1, and the stream is of rank 0 of 2: open it with rank=0, world_size=1"),
        ({"fsdp": True}, r"wait for ever.*set execution.modality_parity to true"),
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
