"""Runs that begin as Hugging Face checkpoints, and modules that are exported as such."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders.jobs import make_job
from cli.server_process import command, serving
from models.hf.tiny import make_tower, our_backbone, our_encoder, our_logits, save
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool
from program.towers import tower_data, tower_job
from safetensors.torch import load_file, save_file
from training.released_folders import WIDTH, llama, siglip
from training.runs import TIMEOUT_S, Run

from dataserver.planning.job.identity import parse_job
from dataserver.planning.job.spec import JobSpec
from trainclient.cli import main
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import load_pretrained
from trainclient.topology.process_grid import Topology
from trainclient.training.config import TrainConfig
from trainclient.training.models import Models

ALONE = Degrees(1, 1, 1, 1, colocated=True)
SPLIT, STAGES = Degrees(1, 2, 1, 1, tp=(2, 2, 1)), Degrees(1, 1, 2, 1)


def job(**stream: Any) -> JobSpec:
    sizing = {"patch": 8, "merge": 2, "max_patches": 64}
    return make_job(stream={"sizing": sizing, **stream}, encoder=1, backbone=(1, 2), generator=1).spec


def models(spec: JobSpec, **config: Any) -> Models:
    return Models.of(TrainConfig.model_validate(config), spec)


def test_sizes_come_from_the_weights_and_fit_the_job(tmp_path: Path) -> None:
    config = {"backbone": {"weights": llama(tmp_path / "llm")}, "encoder": {"weights": siglip(tmp_path / "vit")}}
    found = models(job(), **config)
    (encoder,) = (s for s in found.sizes.values() if isinstance(s, EncoderConfig))
    (backbone,) = (s for s in found.sizes.values() if isinstance(s, BackboneConfig))
    assert (encoder.merge, encoder.output_dim, encoder.position_grid, encoder.layers) == (2, WIDTH, 4, 2)
    assert (backbone.width, backbone.vocab_size, backbone.head_dim, backbone.layers) == (WIDTH, 300, 8, 3)
    assert backbone.query_tokens == job().stream.generation.query_tokens > 0
    json.dumps(found.describe())


def test_weights_that_do_not_fit_the_job(tmp_path: Path) -> None:
    vit, llm = siglip(tmp_path / "vit"), llama(tmp_path / "llm")
    refusals: list[tuple[dict[str, Any], str]] = [
        (
            {"backbone": {"weights": llama(tmp_path / "small", 90)}},
            "know 90 tokens, and the job's tokenizer bytes has 300",
        ),
        ({"backbone": {"weights": vit}}, "are those of an encoder; module llm is of kind backbone"),
        ({"encoder": {"weights": llm}}, "are those of a backbone; module vit is of kind encoder"),
        ({"modules": {"dit": {"weights": vit}}}, "are those of an encoder; module dit is of kind generator"),
        ({"encoder": {"weights": siglip(tmp_path / "v4", 4)}}, "have patch 4, not 8; patch and merge are those of"),
        (
            {"encoder": {"weights": save(make_tower("qwen2-vl"), tmp_path / "q")}},
            "have patch 4, not 8, output_dim 40, not",
        ),
        ({"encoder": {"weights": vit, "layers": 3}}, r"has weights and \['layers'\]; weights bring their own sizes"),
        ({"encoder": {"weights": tmp_path / "nowhere"}}, "there is no file"),
    ]
    for config, message in refusals:
        with pytest.raises(ValueError, match=message):
            models(job(), **config)
    with pytest.raises(ValueError, match=r"3 layers cannot be split into 4 stages"):
        models(make_job(encoder=1, backbone=(1, 4)).spec, backbone={"weights": llm})


def exported(run: Run, module: str, folder: Path, *options: str) -> dict[str, torch.Tensor]:
    line = ["export", "--checkpoint", str(run.checkpoints), "--module", module, "--output", str(folder), *options]
    assert main(line) == 0
    return load_file(folder / "model.safetensors")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_begins_as_its_weights_and_is_exported(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its layers split between peers and their parts dealt to ranks at first; then in stages."""
    llm, vit = llama(tmp_path / "llm"), siglip(tmp_path / "vit")
    (llm / "tokenizer.json").write_text("{}")
    run = Run(fleet.address, tmp_path / "run")
    weights = ["--backbone.weights", str(llm), "--backbone.other-tokenizer", "--encoder.weights", str(vit)]
    shares = ("--backbone.sharding", "zero3")
    code, errors = run.train(SPLIT, *weights, *shares, "--steps", "1", "--optimizer.lr", "1e-300")
    assert code == 0, errors
    begun = exported(run, "llm", tmp_path / "begun", "--base", str(llm))
    there = load_file(llm / "model.safetensors")
    assert begun.keys() == there.keys(), "the head is the embedding"
    for name, tensor in begun.items():
        assert torch.equal(tensor, there[name].double()), name
    assert "left out, since such a model has no parameters for them: query.weight" in capsys.readouterr().out
    tower, there = exported(run, "vit", tmp_path / "tower"), load_file(vit / "model.safetensors")
    there = {f"vision_model.{name.removeprefix('vision_model.')}": tensor for name, tensor in there.items()}
    assert tower.keys() == there.keys()
    assert all(torch.equal(tensor, there[name].double()) for name, tensor in tower.items())

    code, errors = run.train(STAGES, *weights, "--steps", "4", "--optimizer.lr", "0.01")
    assert code == 0, errors
    assert "resumed: 1 of" in errors
    assert run.metrics()[-1]["text_loss"] < run.metrics()[0]["text_loss"]
    trained = exported(run, "llm", tmp_path / "trained", "--base", str(llm), "--dtype", "float32")
    assert not torch.equal(trained["model.norm.weight"], begun["model.norm.weight"].float())
    assert (tmp_path / "trained" / "tokenizer.json").read_text() == "{}"
    ids = torch.randint(0, 300, (2, 33), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
    ours = our_logits(our_backbone(load_pretrained(tmp_path / "trained")), ids)
    with torch.no_grad():
        torch.testing.assert_close(ours, theirs(input_ids=ids).logits, rtol=1e-5, atol=1e-5)

    for line, message in (
        (["--module", "dit"], "module dit is a generator; encoders, backbones, and image towers with learned"),
        (["--module", "audio"], "has no module audio; it has dit, llm, vit"),
        (["--module", "llm", "--output", str(tmp_path / "trained")], "is there already"),
        (["--module", "llm", "--base", str(vit)], "is a siglip_vision_model, and the model a llama"),
        (["--module", "llm", "--checkpoint", str(tmp_path)], "there is no complete checkpoint"),
        (["--module", "llm", "--dtype", "int8"], "dtype"),
    ):
        where = ["--checkpoint", str(run.checkpoints), "--output", str(tmp_path / "new")]
        assert main(["export", *where, *line]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("steps", "degrees"), [(12, ALONE), pytest.param(200, STAGES, marks=pytest.mark.long)], ids=str
)
def test_training_on_photographs_from_weights_to_what_transformers_reads(
    shared_data: Path, tmp_path: Path, steps: int, degrees: Degrees
) -> None:
    """Captions of real photographs are learned, and transformers gives the exported model's logits."""
    arguments = ("--dataset", f"pairs={shared_data / 'laion-mini'}", "--index-dir", f"pairs={tmp_path / 'index'}")
    index = ("index", shared_data / "laion-mini", "--index-dir", tmp_path / "index", "--tokenizer", "bytes")
    subprocess.run(command(*index), check=True, capture_output=True, timeout=TIMEOUT_S)
    weights = ["--backbone.weights", str(llama(tmp_path / "llm")), "--encoder.weights", str(siglip(tmp_path / "vit"))]
    with serving(*arguments) as server:
        run = Run(server.address, tmp_path / "run")
        options = ("--steps", str(steps), "--optimizer.lr", str(0.15 / steps), "--checkpoint.every", "100")
        code, errors = run.train(degrees, *weights, *options)
    assert code == 0, errors
    losses = [line["text_loss"] for line in run.metrics()]
    assert len(losses) == steps
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    trained = tmp_path / "trained"
    exported(run, "llm", trained, "--base", str(tmp_path / "llm"), "--dtype", "float32")
    ids = torch.randint(0, 300, (2, 33), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained).eval()
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(our_logits(our_backbone(load_pretrained(trained)), ids), expected, rtol=1e-4, atol=1e-4)


def test_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export"]) == 2
    error = capsys.readouterr().err
    assert "--checkpoint" in error or "required" in error.lower()
    assert "`trainclient export --help` lists the options" in error
    assert main(["tune"]) == 2
    assert (
        "there is no command 'tune'; use train, export, checkpoints, orchestrate, profile or memory"
        in capsys.readouterr().err
    )


def test_a_backbone_may_know_more_tokens_than_the_tokenizer(tmp_path: Path) -> None:
    """Vocabularies are often padded."""
    spec = job()
    sizes = models(spec, backbone={"weights": llama(tmp_path / "l", 4096)}).sizes[spec.execution.backbone.name]
    assert isinstance(sizes, BackboneConfig)
    assert sizes.vocab_size == 4096


def towers(patch: int = 8, **weights: Path) -> Models:
    data = tower_data({"image": (1, 2), "text": (1, 2)})
    data["stream"]["datasets"][0]["fingerprint"] = "0" * 64
    data["stream"]["tokenizer"] = job().stream.tokenizer.model_dump()
    data["stream"]["generation"] = {"ratio": "0"}
    data["stream"]["sizing"]["patch"] = patch
    spec = parse_job(data).spec
    modules = {name: {"weights": str(folder)} for name, folder in weights.items()}
    return models(spec, modules=modules, contrastive={"loss": "siglip", "features": 5})


def tower_stages(found: Models, name: str) -> list[torch.nn.Module]:
    places = [p for p in Topology.of(found.job).processes if p.modules[0].name == name]
    return [found.build(place, torch.device("cpu"))[0][1].network for place in places]


@torch.no_grad()
def test_image_towers_begin_as_siglip(tmp_path: Path) -> None:
    """In two stages: the mean of what transformers makes of the patches, projected."""
    folder = siglip(tmp_path / "vit")
    first, last = tower_stages(towers(image=folder), "image")
    grid, pixels = torch.tensor([[4, 4]]), torch.randint(256, (16, 8 * 8 * 3), dtype=torch.uint8)
    offsets = torch.tensor([0, 16])
    found = last(None, grid, offsets, first(pixels, grid, offsets, None).hidden).features
    blocks = pixels.view(2, 2, 2, 2, 8, 8, 3)  # block rows and columns, rows and columns within, pixels
    picture = blocks.permute(6, 0, 2, 4, 1, 3, 5).reshape(1, 3, 32, 32) / 127.5 - 1
    theirs = transformers.SiglipVisionModel.from_pretrained(folder)(picture).last_hidden_state.mean(1)
    expected = torch.nn.functional.normalize(last.project(theirs))
    assert torch.allclose(found, expected, atol=1e-5)


@torch.no_grad()
def test_image_towers_begin_as_that_of_qwen2_vl(tmp_path: Path) -> None:
    """What its encoder makes of the patches, before the merger."""
    folder = save(make_tower("qwen2-vl"), tmp_path / "vit")
    first, last = tower_stages(towers(4, image=folder), "image")
    grid, offsets = torch.tensor([[4, 6], [2, 2]]), torch.tensor([0, 24, 28])
    pixels = torch.randint(256, (28, 4 * 4 * 3), dtype=torch.uint8)
    found = last(None, grid, offsets, first(pixels, grid, offsets, None).hidden).features
    encoder, _ = our_encoder(load_pretrained(folder))
    whole = encoder.merger_norm(encoder.features(pixels, grid, offsets))
    means = torch.stack([part.mean(0) for part in whole.split([24, 4])])
    assert torch.allclose(found, torch.nn.functional.normalize(last.project(means)), atol=1e-5)


@torch.no_grad()
def test_text_towers_begin_as_llama(tmp_path: Path) -> None:
    """The last token's hidden state, projected."""
    folder = llama(tmp_path / "llm")
    first, last = tower_stages(towers(text=folder), "text")
    ids, positions, offsets = torch.randint(300, (7,)), torch.arange(7), torch.tensor([0, 7])
    found = last(None, positions, offsets, first(ids, positions, offsets, None).hidden).features
    theirs = transformers.LlamaModel.from_pretrained(folder)(ids[None]).last_hidden_state[:, -1]
    assert torch.allclose(found, torch.nn.functional.normalize(last.project(theirs)), atol=1e-5)


def test_weights_that_no_tower_can_begin_as(tmp_path: Path) -> None:
    vit, llm = siglip(tmp_path / "vit"), llama(tmp_path / "llm")
    clip = save(make_tower("clip"), tmp_path / "clip")
    for weights, message in (
        ({"image": llm}, "are those of a backbone; module image is of kind tower of images"),
        ({"text": vit}, "are those of an encoder; module text is of kind tower of texts"),
        ({"image": clip}, "have a class token, as CLIP has, and image towers none; give it those of SigLIP or"),
        ({"image": siglip(tmp_path / "large", 16)}, "patch 16, not 8"),
        ({"text": llama(tmp_path / "small", 90)}, "know 90 tokens, and the job's tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            towers(**weights)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_image_towers_are_exported_as_siglip(
    fleet: Fleet, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a step that changes nothing; text towers are not exported."""
    weights, exported, checkpoints = siglip(tmp_path / "siglip"), tmp_path / "exported", tmp_path / "checkpoints"
    spec = tower_job(fleet, {"image": (1, 2), "text": (2, 1)}).spec.model_dump(mode="json")
    options = {"steps": 1, "checkpoint": {"directory": str(checkpoints)}, "optimizer": {"lr": 1e-300}}
    case = Case("run", fleet.address, spec, "float32", modules={"image": {"weights": str(weights)}}, training=options)
    pool.run([case], tmp_path)
    command = ["export", "--checkpoint", str(checkpoints), "--output", str(exported)]
    assert main([*command, "--module", "image", "--base", str(weights)]) == 0
    assert capsys.readouterr().out.endswith("no parameters for them: project.weight, scale.log_temperature\n")
    expected, found = load_pretrained(weights), load_pretrained(exported)
    assert found.config == expected.config
    assert found.state.keys() == expected.state.keys()
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in found.state.items())
    assert main([*command, "--module", "text"]) == 2
    assert "module text is a tower; encoders, backbones, and image towers with learned" in capsys.readouterr().err


def with_fields(folder: Path, **fields: Any) -> Path:
    """A checkpoint whose config.json says something else."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


LINEAR, LONG_WAVES = (
    {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0},
    {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10_000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
)  # fmt: skip


def test_sequences_beyond_the_positions_of_weights(tmp_path: Path) -> None:
    """A stretch of all wave lengths counts; that of the long ones is counted by max_position_embeddings already."""
    folder, spec = llama(tmp_path / "l"), job(seq_len=512)
    backbone = spec.execution.backbone.name

    def positions(**config: Any) -> tuple[int, int]:
        sizes = models(spec, **config).sizes[backbone]
        assert isinstance(sizes, BackboneConfig)
        return sizes.positions, sizes.longest

    refused = (
        f"the weights {folder} of module llm know 64 positions (max_position_embeddings), and the job's seq_len is 512"
    )
    for fields in ({"rope_parameters": None}, {"rope_parameters": LONG_WAVES}):
        with_fields(folder, max_position_embeddings=64, **fields)
        with pytest.raises(ValueError, match=re.escape(refused)) as error:
            positions(backbone={"weights": folder})
        assert "set `positions` of the module" in str(error.value)
        assert positions(backbone={"weights": folder, "positions": 600}) == (600, 600)
    with pytest.raises(ValueError, match=r"know 511 positions .* seq_len is 512"):
        positions(backbone={"weights": with_fields(folder, max_position_embeddings=511)})
    with_fields(folder, max_position_embeddings=64, rope_parameters=LINEAR)
    assert positions(backbone={"weights": folder}) == (64, 512)
    assert positions(backbone={"weights": folder, "positions": 1025}) == (129, 1032)
    with pytest.raises(ValueError, match=r"know 504 positions"):
        positions(backbone={"weights": with_fields(folder, max_position_embeddings=63)})
    assert positions() == (0, 0)
    assert positions(backbone={"positions": 4096}) == (4096, 4096)


def test_positions_that_cannot_be(tmp_path: Path) -> None:
    llm, vit = with_fields(llama(tmp_path / "l"), max_position_embeddings=600), siglip(tmp_path / "vit")
    for config, message in (
        ({"backbone": {"weights": llm, "positions": 599}}, f"has positions 599, and the weights {llm} know 600; leave"),
        ({"backbone": {"positions": 100}}, "module llm has positions 100, and the job's seq_len is 512; leave"),
        ({"modules": {"vit": {"positions": 600}}}, r"modules\.vit gives \['positions'\], which modules of"),
        ({"modules": {"vit": {"weights": vit, "positions": 600}}}, r"module vit has weights and \['positions'\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            models(job(seq_len=512), **config)


def test_where_config_json_says_nothing_of_positions_the_default_of_its_family_holds(tmp_path: Path) -> None:
    folder = with_fields(llama(tmp_path / "l"), max_position_embeddings=None)
    assert models(job(seq_len=2048), backbone={"weights": folder})
    with pytest.raises(ValueError, match=r"know 2048 positions"):
        models(job(seq_len=2056), backbone={"weights": folder})


@pytest.mark.slow
def test_weights_that_are_not_finite_end_a_run_before_its_first_step(fleet: Fleet, tmp_path: Path) -> None:
    """A launcher reads no weights; the processes that do name file and tensor."""
    folder = llama(tmp_path / "llm")
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][7] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    run = Run(fleet.address, tmp_path / "run")
    code, errors = run.train(ALONE, "--backbone.weights", str(folder), "--steps", "1")
    assert code == 2, errors
    what = "holds model.norm.weight with 1 of 32 values that are not finite, such as nan at [7]"
    assert f"rank 0: {folder / 'model.safetensors'} {what}" in errors
    assert "Traceback" not in errors
    assert not list(run.checkpoints.iterdir())
