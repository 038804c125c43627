"""Hugging Face's Trainer over the stream: the example of the documentation, as it stands, in real processes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedDataParallelKwargs, ParallelismConfig
from adapters.examples import ExampleRun, calm_and_killed, example
from adapters.whole_jobs import mixed_job, pass_with_parity, tiny_model, whole_job
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from dataserver.planning.job.spec import Execution
from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream
from trainclient.adapters.huggingface import ServedTrainer, _check_ranks
from trainclient.adapters.padded import PaddedShape
from trainclient.adapters.qwen2_vl import Qwen2VLInputs

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
def test_two_processes_train_as_one(server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run(server, model, tmp_path / name) for name in ("alone", "together")]
    runs[0].finish_here(monkeypatch)
    runs[1].finish_forked(2)
    alone, together = map(losses, runs)
    assert list(alone) == list(range(1, STEPS + 1))
    assert alone == pytest.approx(together, rel=2e-3)


@pytest.mark.long
def test_checkpointed_activations_go_with_images_on_some_ranks(server: str, model: Path, tmp_path: Path) -> None:
    """Where the Trainer leaves `find_unused_parameters` out; a rank whose last microbatch has no image then waits."""
    alone, together = (run(server, model, tmp_path / name) for name in ("alone", "together"))
    alone.job = together.job = lambda ranks: mixed_job(ranks, {"steps": STEPS}, modality_parity=False)
    option = "gradient_checkpointing=True, ddp_find_unused_parameters=True"
    together.script = together.script.replace('report_to="none"', f'report_to="none", {option}')
    alone.finish(1)
    together.finish(2)
    assert losses(alone) == pytest.approx(losses(together), rel=2e-3)


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


@contextmanager
def padded_trainer(server: str, folder: Path, **options: Any) -> Iterator[Mixed]:
    """Of four steps, over padded rows; `read` of its stream has the step of each microbatch."""
    job = whole_job(1, {"steps": 4}, packing={"enabled": False})
    job["execution"] |= {"microbatch": 2, "modules": [{**m, "padded": True} for m in job["execution"]["modules"]]}
    arguments = {"num_train_epochs": 1, "report_to": "none", "use_cpu": True, **options}
    with FullModelStream(server, job, rank=0, world_size=1) as stream:
        shape = PaddedShape.of(stream)

        def inputs(microbatch: FullModelMicrobatch, _: torch.device) -> dict[str, Tensor]:
            batch = shape.around(microbatch).pad(microbatch)
            return {name: torch.from_numpy(batch[name]).long() for name in ("token_ids", "labels")}

        yield Mixed(Rows(), Seq2SeqTrainingArguments(str(folder), **arguments), stream=stream, inputs=inputs)


def test_padded_rows_in_another_trainer_that_it_mixes_with(server: str, tmp_path: Path) -> None:
    with padded_trainer(server, tmp_path, max_steps=2, logging_steps=1, save_strategy="no") as found:
        found.train()
    logged = [entry for entry in found.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2]
    assert all(0 < entry["loss"] < 20 and entry["data_wait_s"] >= 0 for entry in logged)


class Terminated(TrainerCallback):
    """SIGTERM, as the Trainer takes it, in the step behind so many updates."""

    def __init__(self, trainer: Mixed, update: int) -> None:
        self.trainer, self.update = trainer, update

    def on_step_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        if state.global_step == self.update:
            (jit,) = [c for c in self.trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback)]
            jit.jit_manager._enable_checkpoint()


def test_a_checkpoint_that_sigterm_asks_for_goes_on_with_the_step_that_it_interrupted(
    server: str, tmp_path: Path
) -> None:
    """In the middle of a step, all of whose samples were read and none has been learned."""
    with padded_trainer(server, tmp_path, enable_jit_checkpoint=True, save_strategy="no") as found:
        found.add_callback(Terminated(found, update=2))
        found.train()
    assert json.loads((tmp_path / "checkpoint-2" / "data_state.json").read_text())["step"] == 2
    with padded_trainer(server, tmp_path, save_strategy="no") as resumed:
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == resumed.stream.step == 4


def steps_read(trainer: Mixed, fail_at: int | None = None) -> list[tuple[int, int]]:
    """Step and number of each microbatch that is used from now on; using one of them fails."""
    used, inputs = list[tuple[int, int]](), trainer._inputs

    def noted(microbatch: FullModelMicrobatch, device: torch.device) -> dict[str, Any]:
        used.append((microbatch.backbone.step, microbatch.backbone.microbatch))
        if len(used) - 1 == fail_at:
            raise MemoryError
        return inputs(microbatch, device)

    trainer._inputs = noted
    return used


@pytest.mark.parametrize("fail_at", [0, 2, 3])
def test_training_again_after_an_exception_begins_the_step_anew(server: str, tmp_path: Path, fail_at: int) -> None:
    """In its first, one of its, or its last microbatch; the losses are those of a run without it."""
    with padded_trainer(server, tmp_path, logging_steps=1, save_strategy="no") as calm:
        calm.train()
    with padded_trainer(server, tmp_path, logging_steps=1, save_strategy="no") as failing:
        steps_read(failing, fail_at)
        with pytest.raises(MemoryError):
            failing.train()
        used = steps_read(failing)
        failing.train()
    assert used[:4] == [(0, number) for number in range(4)]
    found, expected = ([e["loss"] for e in t.state.log_history if "loss" in e] for t in (failing, calm))
    assert found == expected


@pytest.mark.parametrize("ends", ["exception", "early", "end"])
def test_training_again_behind_updates_is_refused(server: str, tmp_path: Path, ends: str) -> None:
    """Since the Trainer counts them, and its learning rate, anew; from a checkpoint it goes on."""
    options = {"max_steps": 2} if ends == "early" else {}
    with padded_trainer(server, tmp_path, logging_steps=1, save_steps=1, **options) as found:
        used = steps_read(found, fail_at=11 if ends == "exception" else None)
        with pytest.raises(MemoryError) if ends == "exception" else nullcontext():
            found.train()
        stands, count = found.stream.step, len(used)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"the Trainer is at update 0, and the stream at step \d where 0.*resume"
            ):
                found.train()
            assert (found.state.global_step, found.stream.step, len(used)) == (0, stands, count)
        found.args.max_steps = 4
        used.clear()
        found.train(resume_from_checkpoint=True)
        assert {step for step, _ in used} == set(range(stands, 4))


def trainer(server: str, model: Path, folder: Path, ranks: int = 1, **arguments: Any) -> ServedTrainer:
    from transformers import AutoModelForImageTextToText

    network = AutoModelForImageTextToText.from_pretrained(model)
    stream = FullModelStream(server, whole_job(ranks, {"steps": STEPS}), rank=0, world_size=ranks)
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
        ({"auto_find_batch_size": True}, r"read already: leave it out"),
        ({"include_num_input_tokens_seen": True}, r'leave it at "no"'),
    ],
)
def test_arguments_that_contradict_the_job(
    server: str, model: Path, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        trainer(server, model, tmp_path, **arguments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"is_fsdp_enabled": True}, r"wait for ever.*set execution.modality_parity to true"),
        ({"is_deepspeed_enabled": True}, r"deepspeed was never tried"),
        ({"tp_size": 2}, r"2 processes share a model.*leave tensor.*out, or use `trainclient train`"),
        ({"find_unused_parameters": False}, r"gradients of the encoder.*set ddp_find_unused_parameters to True"),
    ],
)
def test_launchers_that_contradict_the_job(change: dict[str, Any], says: str) -> None:
    """What a Trainer of two processes learns from accelerate, whoever told it."""

    def told(find_unused_parameters: bool = True, tp_size: int = 1, **flags: bool) -> Any:
        accelerator = SimpleNamespace(
            ddp_handler=DistributedDataParallelKwargs(find_unused_parameters=find_unused_parameters),
            parallelism_config=ParallelismConfig(tp_size=tp_size),
        )
        plain = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False, "args": SimpleNamespace(world_size=2)}
        return SimpleNamespace(accelerator=accelerator, **{**plain, **flags})

    job = Execution.model_validate(whole_job(2, {"steps": 1})["execution"])
    _check_ranks(told(), Rows(), job)
    with pytest.raises(ValueError, match=says):
        _check_ranks(told(**change), Rows(), job)


def test_checkpoints_without_a_stream(server: str, model: Path, tmp_path: Path) -> None:
    found = trainer(server, model, tmp_path)
    with pytest.raises(ValueError, match="has no checkpoint"):
        found.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match=r"checkpoint-2 is no whole checkpoint \(data_state.json.*begin anew"):
        found.train(resume_from_checkpoint=True)
