"""Hugging Face's Trainer over the stream: the example of the documentation, as it stands, in real processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from adapters.examples import ExampleRun, calm_and_killed, example
from adapters.test_whole_rank import read
from adapters.whole_jobs import mixed_job, one_pass, tiny_model, whole_job
from transformers import TrainingArguments

from trainclient.adapters.huggingface import ServedTrainer
from trainclient.adapters.qwen2_vl import Qwen2VLInputs
from trainclient.adapters.whole_rank import WholeRankStream

STEPS = 6


def run(server: str, model: Path, folder: Path) -> ExampleRun:
    return ExampleRun(example("ServedTrainer"), server, model, folder, lambda ranks: whole_job(ranks, {"steps": STEPS}))


def losses(run: ExampleRun) -> dict[int, float]:
    """Of all steps, as the last checkpoint has them; each is logged with what the rank waited."""
    state = json.loads((run.out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
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
        lambda folder: ExampleRun(script, server, model, folder, one_pass), tmp_path, [0, 2, 4]
    )
    assert losses(killed) == pytest.approx(losses(calm), rel=2e-3)


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
