"""Image encoder and language model sharded by accelerate's FSDP2, in Hugging Face's Trainer over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.examples import ExampleRun, example
from adapters.whole_jobs import mixed_job, tiny_model

STEPS = 6
UNCHECKED = "from trainclient.adapters import huggingface\nhuggingface._check_ranks = lambda *_: None\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def run(server: str, model: Path, folder: Path, parity: bool = True, **arguments: Any) -> ExampleRun:
    """The example of the documentation with other arguments of the Trainer, watched. Nothing is saved: safetensors
    cannot read what torch gathers of shards on a CPU."""
    arguments = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0, "save_strategy": "no", **arguments}
    given = ", ".join(f"{name}={value!r}" for name, value in {"report_to": "none", **arguments}.items())
    script = example("ServedTrainer").replace('report_to="none"', given)
    script = "from adapters.sharded_on_cpu import watched\n" + script.replace(
        "trainer.train(", "watched(trainer).train("
    )
    job = lambda ranks: mixed_job(ranks, {"steps": STEPS}, modality_parity=parity)  # noqa: E731
    return ExampleRun(script, server, model, folder, job)


@pytest.mark.long
def test_all_ranks_run_a_sharded_encoder_or_none_and_gradients_are_those_of_one_process(
    server: str, model: Path, tmp_path: Path
) -> None:
    alone, sharded = run(server, model, tmp_path / "alone"), run(server, model, tmp_path / "sharded", fsdp=True)
    alone.finish(1)
    sharded.finish(2)
    whole, *ranks = (
        torch.load(started.folder / f"watched-{rank}.pt") for started, rank in [(alone, 0), (sharded, 0), (sharded, 1)]
    )
    assert not whole["shards"]
    for part in ("visual.blocks.0", "language_model.layers.0"):
        assert any(name.endswith(part) for name in ranks[0]["shards"])
    assert ranks[0]["ran"] == ranks[1]["ran"]
    assert set(ranks[0]["ran"]) == {True, False}
    assert any(rank["had"] != rank["ran"] for rank in ranks), "a rank without images ran it all the same"
    for rank in ranks:
        assert len(rank["gradients"]) == len(whole["gradients"]) == STEPS
        torch.testing.assert_close(rank["gradients"], whole["gradients"], rtol=1e-4, atol=1e-8)
    for name in ("model.visual.patch_embed.proj.weight", "model.visual.blocks.0.mlp.fc1.weight"):
        assert all(gradients[name].abs().max() > 1e-5 for gradients in whole["gradients"])


@pytest.mark.long
def test_without_parity_it_is_refused_and_would_not_train(server: str, model: Path, tmp_path: Path) -> None:
    """As in torchtitan#4777: a rank gathers shards of the encoder that the other one never gathers."""
    refused = run(server, model, tmp_path / "refused", parity=False, fsdp=True)
    assert "set execution.modality_parity to true" in refused.fail(2)
    forced = run(server, model, tmp_path / "forced", parity=False, fsdp=True, ddp_timeout=30)
    forced.script = UNCHECKED + forced.script
    forced.fail(2)
    assert any(set(images) == {True, False} for images in forced.waves(0))
    assert not list(forced.folder.glob("watched-*.pt")), "it came to no end"
