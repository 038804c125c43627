"""What Hugging Face's Trainer loads again: weights, optimizer and data, all of a checkpoint or nothing."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.examples import variables
from adapters.test_huggingface import padded_trainer
from adapters.whole_jobs import tiny_model, whole_job
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2VLForConditionalGeneration,
    TrainingArguments,
)
from transformers.trainer_utils import load_sharded_checkpoint

from trainclient.adapters.full_model import FullModelStream
from trainclient.adapters.hf_checkpoints import read_whole, require_loaded
from trainclient.adapters.huggingface import ServedTrainer
from trainclient.adapters.qwen2_vl import Qwen2VLInputs
from trainclient.adapters.saved_weights import WeightDigests

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def qwen_trainer(server: str, base: Path, folder: Path, **options: Any) -> Iterator[ServedTrainer]:
    """The documentation's, in this process; it saves every second step."""
    arguments = {"num_train_epochs": 1, "report_to": "none", "use_cpu": True, "learning_rate": 1e-2, "save_steps": 2}
    job = whole_job(1, {"steps": STEPS}, global_batch=2)
    with FullModelStream(server, job, rank=0, world_size=1) as stream:
        model = AutoModelForImageTextToText.from_pretrained(base)
        inputs = Qwen2VLInputs.of(model.config, stream.job.stream.sizing)
        given = TrainingArguments(str(folder), logging_steps=1, **{**arguments, **options})
        yield ServedTrainer(model, given, stream=stream, inputs=inputs)


def losses(trainer: ServedTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_resumed_run_has_the_weights_of_one_that_nobody_disturbed(server: str, base: Path, tmp_path: Path) -> None:
    """transformers saves this model under other names than it has, and its Trainer loads by the model's."""
    with qwen_trainer(server, base, tmp_path / "calm") as calm:
        calm.train()
    shutil.copytree(tmp_path / "calm/checkpoint-2", tmp_path / "resumed/checkpoint-2")
    with qwen_trainer(server, base, tmp_path / "resumed") as resumed:
        resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(calm)
    torch.testing.assert_close(resumed.model.state_dict(), calm.model.state_dict(), rtol=0, atol=0)


def test_weights_that_were_not_saved_are_refused(server: str, base: Path, tmp_path: Path) -> None:
    """With the way out, whichever tensors they are."""
    with qwen_trainer(server, base, tmp_path, max_steps=2) as saved:
        saved.train()
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name][0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with (
        qwen_trainer(server, base, tmp_path) as resumed,
        pytest.raises(
            ValueError, match=r"1 of \d+ tensors are not those that .*checkpoint-2 was saved.*from_pretrained"
        ),
    ):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 0


def test_a_tensor_that_the_checkpoint_lacks_is_named(server: str, tmp_path: Path) -> None:
    """Of a model that is none of transformers', to which something was added since."""
    with padded_trainer(server, tmp_path, max_steps=1, save_steps=1) as saved:
        saved.train()
    with padded_trainer(server, tmp_path, max_steps=2) as resumed:
        resumed.model.register_buffer("added", torch.zeros(3))
        with pytest.raises(ValueError, match=r"1 of 1 tensors are not those .*such as added"):
            resumed.train(resume_from_checkpoint=True)


def test_the_best_model_is_loaded_whole(server: str, base: Path, tmp_path: Path) -> None:
    """By the Trainer's own function, which leaves out what has another name, too."""
    with qwen_trainer(server, base, tmp_path, save_steps=1, max_steps=2) as found:
        found.train()
        found.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
        found._load_best_model()
    expected = AutoModelForImageTextToText.from_pretrained(tmp_path / "checkpoint-1")
    torch.testing.assert_close(found.model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def llama(tied: bool) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=tied, **sizes))


MODELS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "tied": lambda _: llama(True),
    "untied": lambda _: llama(False),
    "renamed": lambda base: Qwen2VLForConditionalGeneration.from_pretrained(base),
}


@pytest.mark.parametrize("kind", MODELS)
def test_shards_tied_and_renamed_weights(base: Path, tmp_path: Path, kind: str) -> None:
    """As the Trainer loads them, into a model with other weights; in a wider type they are the same."""
    model, other = (MODELS[kind](base).to(torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    size = max(parameter.numel() for parameter in model.parameters()) * 3
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    saved = WeightDigests(model).now()
    load_sharded_checkpoint(other, str(tmp_path), strict=False)
    require_loaded(other, tmp_path, saved)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    require_loaded(other.float(), tmp_path, saved)


@pytest.mark.long
def test_adapters_of_peft(server: str, base: Path, tmp_path: Path, python_with: Callable[[str], Path]) -> None:
    """Which are saved without the frozen weights."""
    line = [python_with("peft"), Path(__file__).with_name("peft_resume.py"), server, base, tmp_path]
    found = subprocess.run(line, env=variables(), capture_output=True, text=True, check=False, timeout=200)
    assert found.returncode == 0, found.stderr[-3000:]


def test_frozen_weights_are_read_once_but_after_a_change() -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    digests = WeightDigests(model)
    first = digests.now()
    with torch.no_grad():
        model.weight.add_(1)
    assert {name for name, digest in digests.now().items() if digest != first[name]} == {"weight"}
    with torch.no_grad():
        model.bias.add_(1)
    assert {name for name, digest in digests.now().items() if digest != first[name]} == {"weight", "bias"}


def cut(folder: Path, name: str) -> None:
    """As by a kill while it is written."""
    file = folder / name
    file.write_bytes(file.read_bytes()[:20])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no state of the stream": lambda folder: (folder / "data_state.json").unlink(),
    "part of it": lambda folder: cut(folder, "data_state.json"),
    "no state of the Trainer": lambda folder: (folder / "trainer_state.json").unlink(),
    "part of that": lambda folder: cut(folder, "trainer_state.json"),
    "no optimizer": lambda folder: (folder / "optimizer.pt").unlink(),
    "no learning rates": lambda folder: (folder / "scheduler.pt").unlink(),
    "still being saved": lambda folder: (folder / "checkpoint-is-incomplete.txt").touch(),
}


def test_of_a_checkpoint_that_is_not_whole_the_error_names_the_newest_that_is(server: str, tmp_path: Path) -> None:
    with padded_trainer(server, tmp_path, save_steps=1) as saved:
        saved.train()
    (tmp_path / "checkpoint-notes").mkdir()
    for number, damage in zip((4, 3), DAMAGE.values(), strict=False):
        damage(tmp_path / f"checkpoint-{number}")
    says = (
        r"checkpoint-4 is no whole checkpoint \(data_state.json.*remove it and resume from .*checkpoint-2, the newest"
    )
    with padded_trainer(server, tmp_path) as resumed, pytest.raises(ValueError, match=says):
        resumed.train(resume_from_checkpoint=True)
    with padded_trainer(server, tmp_path) as resumed:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state.global_step == 4


def test_what_a_checkpoint_may_lack(server: str, tmp_path: Path) -> None:
    with padded_trainer(server, tmp_path / "saved", max_steps=1, save_steps=1) as saved:
        saved.train()
    for name, damage in DAMAGE.items():
        folder = tmp_path / name / "checkpoint-1"
        shutil.copytree(tmp_path / "saved" / "checkpoint-1", folder)
        assert read_whole(folder, sharded=False)[1] == 1
        damage(folder)
        with pytest.raises(ValueError, match=r"checkpoint-1 is no whole.*no other one"):
            read_whole(folder, sharded=False)


def test_a_run_that_ends_while_it_saves_leaves_no_whole_checkpoint(server: str, tmp_path: Path) -> None:
    """Neither a new one, nor where an older one was whole."""
    with padded_trainer(server, tmp_path, max_steps=2, save_steps=1) as saved:
        saved.train()
    for step in (2, 3):
        with padded_trainer(server, tmp_path, max_steps=3, save_steps=step) as killed:

            def full(_: str) -> None:
                raise OSError("no space left on device")

            killed._save_rng_state = full  # type: ignore[method-assign]
            with pytest.raises(OSError, match="no space"):
                killed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        with pytest.raises(ValueError, match=rf"checkpoint-{step} is no whole.*resume from .*checkpoint-1, the newest"):
            killed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
