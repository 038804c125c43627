"""Models as the solver reads them, beside the models that are trained."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from models.hf.tiny import BACKBONES, TOWERS, causal_config
from models.hf.tiny_wholes import WHOLES

from dataserver.planning.job.fields import MODELS, ModelSize
from trainclient.models.audio_encoder import AudioEncoder
from trainclient.models.backbone import BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import ImageEncoder
from trainclient.models.generator import ImageGenerator
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.folder import part_of
from trainclient.models.hf.registry import families_of
from trainclient.models.presets import (
    AUDIO_ENCODERS,
    audio_encoder_config,
    backbone_config,
    encoder_config,
    generator_config,
)
from trainclient.orchestrate.cluster import cluster
from trainclient.orchestrate.config_sizes import NetworkError
from trainclient.orchestrate.costs import analytic_cost, options
from trainclient.orchestrate.memory import ENCODER_BLOCK, block_bytes, saved_bytes
from trainclient.orchestrate.networks import Network, read_network
from trainclient.orchestrate.sample_sizes import SampleSize
from trainclient.orchestrate.workload import Load, Stream, workload

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "head_dim": 64,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
    "num_attention_heads": 16, "patch_size": 14,
}  # fmt: skip


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in MODELS.items() for n in names if n != "tiny"])
def test_parameters_are_those_of_the_models(kind: str, name: str) -> None:
    network = read_network(kind, name)
    with torch.device("meta"):
        if name in AUDIO_ENCODERS:
            made = parameters(AudioEncoder(audio_encoder_config(name, 128, 1, 4096)).layers)
        elif kind == "encoder":
            made = parameters(ImageEncoder(encoder_config(name, 14, 2, 4096)).layers)
        elif kind == "backbone":
            made = parameters(BackboneStage(backbone_config(name, 128_256, 0)))
        elif kind == "generator":
            made = parameters(ImageGenerator(generator_config(name, 14, 2, 4096)).layers)
        else:
            made = network.parameters
    assert network.parameters == pytest.approx(made, rel=0.03)


def test_a_config_of_hugging_face_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    wanted = ModelSize(16, 2048, 8192, 32, 8, 128_256)
    assert read_network("backbone", str(file)).size == read_network("backbone", str(tmp_path)).size == wanted
    vision = {"model_type": "siglip_vision_model", **SIGLIP}
    file.write_text(json.dumps({"model_type": "llava", "text_config": LLAMA, "vision_config": vision}))
    assert read_network("backbone", str(file)).size == wanted
    assert read_network("encoder", str(file)).size == ModelSize(26, 1152, 4304, 16, 16), "without the last layer"
    qwen = {"model_type": "qwen2_vl", "depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}
    file.write_text(json.dumps({**LLAMA, "head_dim": None, "model_type": "qwen2_vl", "vision_config": qwen}))
    assert read_network("encoder", str(file)).size == MODELS["encoder"]["vit-h"]
    assert read_network("backbone", str(file)).size == wanted
    file.write_text(
        json.dumps({"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": vision})
    )
    assert read_network("backbone", str(file)).size == ModelSize(32, 4096, 11008, 32, 32, 32_000), "as released"
    for ratio in ("4", float("inf"), float("nan"), 0, True):
        file.write_text(json.dumps({"model_type": "qwen2_vl", "vision_config": qwen | {"mlp_ratio": ratio}}))
        with pytest.raises(NetworkError, match=r"mlp_ratio is .*; a number above 0 is required"):
            read_network("encoder", str(file))
    file.write_text(json.dumps({"model_type": "qwen2_vl", "vision_config": qwen | {"embed_dim": 10**400}}))
    with pytest.raises(NetworkError, match=r"embed_dim is 10+; integers up to 1048576 are required"):
        read_network("encoder", str(file))


def test_each_encoder_is_its_own_part_of_a_config(tmp_path: Path) -> None:
    """Of a model that sees and hears: its tower of images for images and videos, and the one of clips for these."""
    hears = {"model_type": "whisper", "encoder_layers": 32, "d_model": 1280, "encoder_ffn_dim": 5120}
    sees = {"model_type": "siglip_vision_model", **SIGLIP}
    whole = {"vision_config": sees, "audio_config": hears | {"encoder_attention_heads": 20}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", **whole}))
    assert read_network("encoder", str(tmp_path), modality="audio").size == MODELS["encoder"]["whisper-large"]
    for modality in (None, "video"):
        assert read_network("encoder", str(tmp_path), modality=modality).size == ModelSize(27, 1152, 4304, 16, 16)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", "vision_config": sees}))
    with pytest.raises(NetworkError, match=r"of audio encoders qwen2_audio, qwen2_audio_encoder, whisper are"):
        read_network("encoder", str(tmp_path), modality="audio")


def test_towers_are_read_from_one_config(tmp_path: Path) -> None:
    file, text = tmp_path / "config.json", {**SIGLIP, "num_hidden_layers": 12}
    for family in ("siglip", "clip"):
        named = [
            {**sizes, "model_type": f"{family}_{kind}_model"} for kind, sizes in (("vision", SIGLIP), ("text", text))
        ]
        whole = {"model_type": family, "vision_config": named[0], "text_config": named[1]}
        for towers in (
            {},
            {"vision_config": SIGLIP | {"model_type": family}, "text_config": text | {"model_type": family}},
        ):
            file.write_text(json.dumps(whole | towers))
            assert read_network("tower", str(file), "image", "image").size == ModelSize(27, 1152, 4304, 16, 16)
            assert read_network("tower", str(file), "text", "text").size == ModelSize(12, 1152, 4304, 16, 16)
        assert read_network("encoder", str(file)).size.layers == 27


def test_sizes_in_yaml_are_read(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump({"layers": 2, "width": 64, "mlp_width": 256, "heads": 4}))
    assert read_network("encoder", str(file)).size == ModelSize(2, 64, 256, 4, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; of backbones gemma, gemma3, gemma3_text, llama"),
        ({"head_dim": -128}, "head_dim is -128; an integer"),
        ({"num_attention_heads": 30, "num_key_value_heads": None, "head_dim": None}, "heads must divide the width"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'; integers"),
        ({"hidden_size": None}, "hidden_size of backbone 'llama' are missing"),
        ({"num_hidden_layers": 0}, "layers is 0; an integer"),
        ({"head_dim": {}}, "head_dim is {}; an integer"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | change))
    with pytest.raises(NetworkError, match=said):
        read_network("backbone", str(file))


@pytest.mark.parametrize("layer", [5, 0, -28, True, "-2", [-2]])
def test_a_feature_layer_is_one_of_the_tower(tmp_path: Path, layer: object) -> None:
    file = tmp_path / "config.json"
    whole = {"model_type": "llava", "text_config": LLAMA, "vision_config": SIGLIP}
    file.write_text(json.dumps(whole | {"vision_feature_layer": layer}))
    said = f"vision_feature_layer is {layer!r}; one layer, from -27 to -1, is required"
    with pytest.raises(NetworkError, match=re.escape(said)):
        read_network("encoder", str(file))
    file.write_text(json.dumps(whole | {"vision_feature_layer": -27}))
    assert read_network("encoder", str(file)).size.layers == 1


def test_a_file_that_lacks_sizes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    for content, said in (("layers: 2", "lacks"), ("[1]", "holds a list"), ("{", "cannot be used")):
        file.write_text(content)
        with pytest.raises(NetworkError, match=said):
            read_network("encoder", str(file))


def test_degrees_divide_heads_and_groups() -> None:
    devices, load = cluster("h100", 16), Load(1, 100, 10_000, 100, ((1, 100),))
    network = Network("backbone", "backbone", ModelSize(2, 384, 1024, 6, 2, 1000))
    assert {o.tp for o in options(network, load, devices)} == {1, 2}
    odd = Network("backbone", "backbone", ModelSize(2, 192, 512, 3, 3, 1000))
    assert {o.tp for o in options(odd, load, devices)} == {1}
    assert {o.tp for o in options(network, load, devices, 1)} == {1}
    assert {o.recompute for o in options(replace(network, frozen=True), load, devices)} == {False}


def test_a_model_whose_times_no_job_can_say_is_refused() -> None:
    huge = Network("backbone", "backbone", ModelSize(1 << 20, 1 << 20, 1 << 20, 64, 64, 1000))
    with pytest.raises(ValueError, match=r"module backbone has [\d,]+B parameters in 1048576 layers.*check its sizes"):
        options(huge, Load(1, 100, 10_000, 100, ((1, 100),)), cluster("h100", 8))


def test_narrow_shares_and_sums_cost() -> None:
    """Eight devices take more than an eighth of the time of one, and more so in a narrow model."""
    devices = cluster("h100", 8)

    def loss(name: str, kind: str) -> float:
        one, eight = (analytic_cost(read_network(kind, name), tp, devices).linear_ps for tp in (1, 8))
        return 8 * eight / one

    assert 1 < loss("llama3-70b", "backbone") < loss("llama3-7b", "backbone") < loss("vit-h", "encoder")


def test_activations_are_those_of_the_paper() -> None:
    """Korthikanti et al. 2022, section 4.2, without matrices of probabilities and dropout: 34 x the width, divided."""
    network = read_network("encoder", "vit-h")
    assert block_bytes(network.role.block, network.size, 1) == 34 * 1280
    assert block_bytes(network.role.block, network.size, 8) == (10 + 24 / 8) * 1280


@pytest.mark.parametrize("name", [*WHOLES, *BACKBONES, *TOWERS])
def test_sizes_are_those_that_the_trainer_reads(name: str, tmp_path: Path) -> None:
    """Of every family that it has: windows, wide heads, gates, layers that are not read, and further rows."""
    if name in WHOLES:
        config = WHOLES[name].config()
    elif name in BACKBONES:
        config = causal_config(name)
    else:
        config = getattr(transformers, TOWERS[name][0])(**TOWERS[name][2])
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    whole = Fields(json.loads(path.read_text()), str(path))
    for family in families_of(whole):
        kind = "backbone" if family.kind is BackboneConfig else "encoder"
        theirs = family.read(part_of(whole, family), whole)
        assert read_network(kind, str(path)).size == theirs.size


def test_windows_leave_fewer_pairs() -> None:
    """Of layers that all have windows the cost says so; where some have, a row takes as long as a window."""
    size = ModelSize(6, 64, 128, 4, 4, 100)
    plain, all_, some = (
        Network("backbone", "backbone", replace(size, window=w, global_layers=g)) for w, g in ((0, 0), (8, 0), (8, 2))
    )
    assert (plain.window, all_.window, some.window) == (None, 16, None)
    assert (all_.pair_flops, some.pair_flops) == (plain.pair_flops, plain.pair_flops // 3)
    assert some.windowed_flops == plain.pair_flops * 2 // 3 * 16
    samples = workload([SampleSize(1, 98, ())], Stream(1, 128, packed=False))
    assert samples.load(plain).squares == 100**2
    assert samples.load(all_).squares == 100 * 16
    devices = cluster("h100", 8)
    costs = [analytic_cost(network, 1, devices) for network in (plain, all_, some)]
    assert [cost.window for cost in costs] == [None, 16, None]
    assert costs[0].linear_ps == costs[1].linear_ps < costs[2].linear_ps
    assert costs[0].quadratic_fs == costs[1].quadratic_fs > costs[2].quadratic_fs


def test_wide_rows_and_gates_take_memory() -> None:
    size = ModelSize(4, 64, 128, 4, 4)
    sizes = (size, replace(size, deepstack=2), replace(size, gated=True))
    plain, wide, gated = (saved_bytes(ENCODER_BLOCK, s, 1, recompute=False) for s in sizes)
    assert wide - plain == 2 * 2 * 64
    assert gated - plain == 4 * 2 * 2 * 128
    assert saved_bytes(ENCODER_BLOCK, replace(size, head_dim=32), 1, recompute=False) > plain
