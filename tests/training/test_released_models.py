"""Runs whose encoder and backbone start from one folder of a vision-language model, and go back into its form."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders.jobs import TOKENIZER, make_job
from models.hf.tiny import make_tower, randomise, save
from models.hf.tiny_wholes import IDS, TEXT
from program.conftest import Fleet
from program.runtime_cases import Degrees
from safetensors.torch import load_file
from training.runs import Run
from transformers import Qwen2VLImageProcessorPil

from dataserver.planning.job.spec import JobSpec
from trainclient.cli import main
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import PretrainedError
from trainclient.topology.process_grid import Topology
from trainclient.training.config import ConfigError, TrainConfig, load_config, validate_config
from trainclient.training.models import Models, weight_notes
from trainclient.training.run_name import digest_settings

SIZING = {"patch": 8, "merge": 2, "max_patches": 64}
FIXED = {"patch": 8, "merge": 2, "side": 64}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def qwen3_vl(folder: Path) -> Path:
    """Tied, with rows three times as wide as the backbone."""
    vision = {"depth": 3, "num_heads": 2, "patch_size": 8, "hidden_size": 24, "intermediate_size": 40}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": 300, "rope_parameters": ROPE},
        vision_config={
            **vision,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings=True,
        **IDS,
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    randomise(model, 3)
    return save(model, folder)


def models(folder: Path, stages: int = 2, **config: Any) -> Models:
    spec: JobSpec = make_job(stream={"sizing": SIZING}, encoder=1, backbone=(1, stages), generator=1).spec
    return Models.of(TrainConfig.model_validate({"models": {"from": folder}, **config}), spec)


def test_a_folder_is_the_encoder_and_the_backbone_of_a_job(tmp_path: Path) -> None:
    """Encoder rows are as wide as the first chunk of the backbone takes them; all other rows are as wide as it is."""
    found = models(qwen3_vl(tmp_path / "c"))
    (encoder,) = (s for s in found.sizes.values() if isinstance(s, EncoderConfig))
    (backbone,) = (s for s in found.sizes.values() if isinstance(s, BackboneConfig))
    described = found.describe()
    assert json.loads(json.dumps(described)) == described, "as a checkpoint has it"
    assert (encoder.row_width, backbone.image_width, backbone.width, backbone.tied) == (96, 96, 32, True)
    topology = Topology.of(found.job)
    widths, read = {}, {}
    for process in topology.processes:
        for chunk in process.chunks:
            site, made = found.shaped(chunk)
            widths[str(chunk)] = site.width_in, site.row_width
            read[str(chunk)] = made.tensors
    assert widths == {"vit.0": (96, 96), "llm.0": (96, 32), "llm.1": (32, 32), "dit.0": (32, 32)}
    assert "rotary_positions" in read["llm.0"]
    assert "position_ids" not in {*read["llm.0"], *read["llm.1"]}


def test_a_configuration_file_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("models: {from: /hf/model}\nbackbone: {weights: /hf/other}\n")
    config = validate_config(load_config(tmp_path / "train.yaml"))
    assert (config.models.folder, config.backbone.weights) == (Path("/hf/model"), Path("/hf/other"))


def test_models_that_do_not_fit_the_job_or_each_other(tmp_path: Path) -> None:
    folder = qwen3_vl(tmp_path / "c")
    found = models(folder, stages=4)
    chunk = next(c for p in Topology.of(found.job).processes for c in p.chunks if str(c) == "llm.0")
    with pytest.raises(ValueError, match="of 4 stages the first has 1 layers; set pp so that it has at least 2"):
        found.shaped(chunk)
    with pytest.raises(ConfigError, match=r"module vit has weights and \['layers'\]; weights bring their own sizes"):
        models(folder, encoder={"layers": 2})
    with pytest.raises(ConfigError, match="vit makes rows of width 32, and llm takes rows of width 96 for images"):
        models(folder, modules={"vit": {"weights": save(make_tower("qwen2-vl of patch 8"), tmp_path / "q")}})


def test_the_rule_of_the_processor_is_the_jobs_or_a_note_says_so(tmp_path: Path) -> None:
    folder = qwen3_vl(tmp_path / "c")
    config = TrainConfig.model_validate({"models": {"from": folder}})
    assert weight_notes(config, models(folder).job) == []
    Qwen2VLImageProcessorPil(patch_size=8).save_pretrained(folder)
    (note,) = weight_notes(config, models(folder).job)
    assert note.startswith(
        f"the image processor of {folder} sizes images otherwise than the job; for its grids and pixels set"
    )
    square = make_job(stream={"sizing": {**FIXED, "rule": "square"}}, encoder=1, backbone=(1, 2)).spec
    with pytest.raises(PretrainedError, match=r"sizing.rule is square, .* has the rule qwen"):
        Models.of(config, square)


def test_tokens_that_weights_do_not_know_begin_as_the_mean_of_the_others(tmp_path: Path) -> None:
    folder = qwen3_vl(tmp_path / "c")
    found = models(folder, backbone={"vocabulary": 310})
    process = next(p for p in Topology.of(found.job).processes if any(str(c) == "llm.0" for c in p.chunks))
    ((_, module),) = found.build(process, torch.device("cpu"))
    rows = module.network.embed.weight
    theirs = load_file(folder / "model.safetensors")["model.language_model.embed_tokens.weight"]
    assert torch.equal(rows[:300], theirs)
    assert torch.allclose(rows[300:], theirs.mean(0).expand(10, -1), atol=1e-7)
    with pytest.raises(ConfigError, match=r"module llm has vocabulary 299, and the weights .* know 300; leave it out"):
        models(folder, backbone={"vocabulary": 299})
    with pytest.raises(ConfigError, match=r"vit has weights and \['vocabulary'\]; weights bring"):
        models(folder, modules={"vit": {"weights": folder, "vocabulary": 310}})
    with pytest.raises(ConfigError, match=r"llm has lora adapters, but has vocabulary, .* never be learned; leave one"):
        models(folder, backbone={"vocabulary": 310, "lora": {"rank": 2}})


def test_another_tokenizer_than_that_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Whatever the number of its ids, unless somebody says that it is meant so."""
    folder = qwen3_vl(tmp_path / "c")
    (folder / "tokenizer.json").write_text("{}")
    message = (
        rf"tokenizer bytes is not that of the weights of module llm, {folder}/tokenizer.json, .*--tokenizer "
        rf"NAME={folder} and give the job that NAME; .* set backbone.other_tokenizer \(or that of modules.llm\), or voc"
    )
    with pytest.raises(ConfigError, match=message):
        models(folder)
    said: tuple[dict[str, Any], ...] = (
        {"backbone": {"other_tokenizer": True}},
        {"modules": {"llm": {"weights": folder, "other_tokenizer": True}}},
        {"backbone": {"vocabulary": 300}},
    )
    described = [models(folder, **options).describe() for options in said]
    assert described[0] == described[1] == described[2]
    ranks, pattern = b"IQ== 0\nIg== 1\n", b"."
    for name, data in {"tokenizer.model": b"pieces", "own.tiktoken": ranks, "own.tiktoken.pattern": pattern}.items():
        (folder / name).write_bytes(data)
    for data in (b"{}", b"pieces", ranks + b"\0" + pattern):
        own = {**TOKENIZER, "digest": hashlib.sha256(data).hexdigest()}
        same = make_job(stream={"sizing": SIZING, "tokenizer": own}, encoder=1, backbone=(1, 2)).spec
        Models.of(TrainConfig.model_validate({"models": {"from": folder}}), same)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer bytes is not that of .* module llm, .*tokenizer.model"):
        models(folder)
    (folder / "own.tiktoken.pattern").unlink()  # then no server can be started with it
    with pytest.raises(ConfigError, match=r"tokenizer bytes is not that of .* module llm, .*tokenizer.model"):
        models(folder)
    (folder / "tokenizer.model").write_bytes(ranks)  # as Llama's; servers may have a pattern from elsewhere
    models(folder)


def test_a_run_is_the_same_whatever_is_said_of_its_tokenizer() -> None:
    job, found = make_job(encoder=1, backbone=(1, 2)), set()
    for said in (False, True):
        model = {"other_tokenizer": said}
        found.add(digest_settings(TrainConfig.model_validate({"backbone": model, "modules": {"llm": model}}), job))
    assert len(found) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_begins_as_a_folder_and_its_export_is_one(fleet: Fleet, tmp_path: Path) -> None:
    """With two stages that both hold the tied head; what a step of no size leaves is the same to the bit."""
    base = qwen3_vl(tmp_path / "c")
    run = Run(fleet.address, tmp_path / "run")
    begin = ["--models.from", str(base)]
    stages = Degrees(1, 1, 2, 1)
    code, errors = run.train(stages, *begin, "--steps", "1", "--optimizer.lr", "1e-300")
    assert code == 0, errors
    there = load_file(base / "model.safetensors")
    begun = exported(run, base, tmp_path / "begun")
    assert begun.keys() == there.keys()
    assert all(torch.equal(tensor, there[name].double()) for name, tensor in begun.items())
    code, errors = run.train(stages, *begin, "--steps", "4", "--optimizer.lr", "0.01")
    assert code == 0, errors
    assert run.metrics()[-1]["text_loss"] < run.metrics()[0]["text_loss"]
    trained = exported(run, base, tmp_path / "trained", "--dtype", "float32")
    assert [name for name in there if torch.equal(trained[name], there[name])] == []
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def exported(run: Run, base: Path, folder: Path, *options: str) -> dict[str, torch.Tensor]:
    line = ["export", "--checkpoint", str(run.checkpoints), "--base", str(base), "--output", str(folder), *options]
    assert main(line) == 0
    return load_file(folder / "model.safetensors")
