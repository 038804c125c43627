"""Low-rank adapters: what they change, what is trained, and that merged weights compute the same."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from trainclient.models.audio_encoder import AudioEncoder, AudioEncoderConfig
from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.hf import PretrainedError, Usage, export_adapter, export_pretrained
from trainclient.models.lora import LowRank, adapt, is_adapter, merged
from trainclient.models.parameters import initialise
from trainclient.models.rotary import RotarySections
from trainclient.models.towers import ImageTower, ImageTowerConfig, TextTower, TextTowerConfig

USAGE = Usage(bos=1, eos=2, seq_len=64, max_patches=4)
CONFIG = BackboneConfig(2, 32, 48, 4, 2, 1e4, 50, query_tokens=2)
ADAPTERS = LowRank(3, 12.0, ["query", "value", "down"])
WITH_PEFT = """
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, merged = sys.argv[1:]
plain, expected = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in (base, merged))
with torch.no_grad():
    tokens = torch.arange(1, 13)[None]
    before, expected = plain(tokens).logits, expected(tokens).logits
    assert (before - expected).abs().max() > 0.01
    found = PeftModel.from_pretrained(plain, adapter)(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
"""
"""Whether peft makes of a model and its adapters what merged weights are."""


def batch() -> BackboneBatch:
    generator, none = torch.Generator().manual_seed(1), torch.zeros(0, dtype=torch.int64)
    tokens, labels = (torch.randint(0, 50, (12,), generator=generator) for _ in range(2))
    return BackboneBatch(torch.tensor([0, 5, 12]), torch.arange(12), tokens, none, torch.tensor([10, 11]), labels)


def backbone(adapters: LowRank | None, config: BackboneConfig = CONFIG) -> BackboneStage:
    network = BackboneStage(config)
    if adapters is not None:
        adapt(network, adapters)
    network.to(torch.float64)
    initialise(network, 3, "llm")
    return network


def outputs(network: BackboneStage) -> tuple[Tensor, Tensor]:
    found = network(batch())
    return found.conditions, found.loss_sum


def test_fresh_adapters_change_nothing_and_names_stay() -> None:
    plain, adapted = backbone(None), backbone(ADAPTERS)
    for ours, theirs in zip(outputs(adapted), outputs(plain), strict=True):
        assert torch.equal(ours, theirs)
    names, more = ({name for name, _ in network.named_parameters()} for network in (plain, adapted))
    assert names < more
    assert all(is_adapter(name) for name in more - names)
    layers = [f"layers.{n}.{layer}" for n in (0, 1) for layer in ("attention.query", "attention.value", "mlp.down")]
    assert more - names == {f"{layer}.lora_{part}.weight" for layer in layers for part in ("down", "up")}


def test_adapters_and_query_tokens_alone_are_trained_and_merged_weights_compute_the_same() -> None:
    adapted = backbone(ADAPTERS)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        conditions, loss = outputs(adapted)
        (loss + conditions.square().sum()).backward()
        optimizer.step()
    changed = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if is_adapter(name)} | {"query.weight"}
    plain = backbone(None)
    state = merged({name: p.detach() for name, p in adapted.named_parameters()}, ADAPTERS)
    plain.load_state_dict(state)
    for ours, theirs in zip(outputs(plain), outputs(adapted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not torch.equal(state["layers.0.mlp.down.weight"], before["layers.0.mlp.down.weight"])


GRID, ENDS = torch.tensor([[2, 4], [4, 4]]), torch.tensor([0, 8, 24])
PATCHES = torch.randint(0, 256, (24, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
SIZES = {"layers": 2, "width": 24, "heads": 2, "mlp_width": 32, "patch": 2, "merge": 2, "output_dim": 10}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2-vl": {"patch_bias": False},
    "qwen2.5-vl": {"rms_norms": True, "gated": True, "window": 1, "global_layers": (1,)},
    "qwen3-vl": {"position_grid": 4, "rotary": True, "projector": "merger", "deepstack": (0,)},
    "siglip": {"position_grid": 4},
    "siglip2": {"position_grid": 4, "position_scaling": "antialias"},
    "clip": {"position_grid": 4, "class_token": True},
    "dinov2": {"position_grid": 4, "class_token": True, "class_norm": False, "registers": 2, "layer_scale": True},
    "llava": {"position_grid": 4, "class_token": True, "projector": "mlp"},
    "gemma3": {"position_grid": 4, "projector": "pool"},
    "idefics3": {"position_grid": 4, "projector": "linear"},
    "internvl": {"position_grid": 4, "class_token": True, "layer_scale": True, "projector": "normed_mlp"},
}
"""Encoders as released ones have them."""
BACKBONES: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True, "tied": True},
    "qwen3": {"head_norms": True, "head_dim": 12},
    "qwen3-vl": {"head_norms": True, "deepstack": 1, "sections": RotarySections((2, 1, 1), interleaved=True)},
    "mistral": {"window": 3},
    "gemma": {"offset_norms": True, "activation": "gelu_tanh", "embed_scale": 32**0.5, "tied": True},
    "gemma3": {
        "head_norms": True,
        "offset_norms": True,
        "post_norms": True,
        "activation": "gelu_tanh",
        "embed_scale": 32**0.5,
        "score_scale": 0.25,
        "window": 3,
        "global_layers": (1,),
        "windowed_rotary_base": 100.0,
        "two_way_images": True,
        "tied": True,
    },
}
"""Backbones as released ones have them."""


def backbone_outputs(network: BackboneStage) -> Tensor:
    """Conditions and loss of a batch with two images, in one row whose last value is the loss."""
    config, images = network.config, torch.tensor([-1, 0, 0, -1, -1, -1, 1, 1, 1, -1, -1, -1])
    positions = torch.arange(12).expand(3, -1) if config.sections is not None else torch.arange(12)
    slots = (images >= 0).nonzero().squeeze(1)
    given = replace(batch(), position_ids=positions, embedding_slots=slots, image_blocks=images)
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(len(slots), config.image_width, generator=generator, dtype=torch.float64)
    found = network(given, embeddings=rows)
    return torch.cat([found.conditions.flatten(), found.loss_sum[None]])[None]


def other_networks() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[Any], Tensor], list[str], set[str]]]:
    """All kinds: how they are made and run, where adapters go, and what is trained beside them."""
    targets = ["query", "output", "up", "down"]
    for name, changes in BACKBONES.items():
        make = partial(BackboneStage, replace(CONFIG, **changes))
        yield name, make, backbone_outputs, ["key", "value", "gate", *targets], {"query.weight"}
    for name, changes in KINDS.items():
        config = EncoderConfig(**(SIZES | changes))
        more = ["gate"] if config.gated else []
        beside = {n for n, _ in ImageEncoder(config).named_parameters() if n.startswith(("merger.", "deepstack."))}
        yield name, partial(ImageEncoder, config), lambda net: net(PATCHES, GRID, ENDS), targets + more, beside
    audio = AudioEncoderConfig(layers=2, width=24, heads=2, mlp_width=32, bins=4, merge=2, output_dim=10)
    mel = torch.randn(30, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    clips = torch.tensor([0, 10, 30]), torch.tensor([0, 5, 15])
    projector = {"projector.weight", "projector.bias"}
    yield "whisper", partial(AudioEncoder, audio), lambda net: net(mel, *clips), targets, projector
    image = ImageTowerConfig(**(SIZES | KINDS["siglip2"]))
    yield (
        "image tower",
        partial(ImageTower, image),
        lambda net: net(PATCHES, GRID, ENDS, None).features,
        targets,
        {"project.weight"},
    )
    text = TextTowerConfig(2, 32, 48, 4, 2, 1e4, 50, query_tokens=0, output_dim=6)
    tokens = torch.arange(12) % 7, torch.tensor([*range(5), *range(7)]), torch.tensor([0, 5, 12]), None
    yield (
        "text tower",
        partial(TextTower, text),
        lambda net: net(*tokens).features,
        [*targets, "gate"],
        {"project.weight"},
    )


@pytest.mark.parametrize(
    ("name", "make", "run", "targets", "beside"), [pytest.param(*n, id=n[0]) for n in other_networks()]
)
def test_adapters_of_every_kind_of_network(
    name: str, make: Callable[[], nn.Module], run: Callable[[Any], Tensor], targets: list[str], beside: set[str]
) -> None:
    """They are trained, with what makes rows of features, and weights into which they are merged compute the same."""
    adapters = LowRank(3, 12.0, targets)
    plain, adapted = make().double(), make()
    adapt(adapted, adapters)
    adapted.double()
    for network in (plain, adapted):
        initialise(network, 3, name)
    assert torch.equal(run(plain), run(adapted))
    before = {key: p.detach().clone() for key, p in adapted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        rows = run(adapted)
        (rows * torch.linspace(-1, 1, rows.shape[1], dtype=torch.float64)).sum().backward()
        optimizer.step()
    changed = {key for key, p in adapted.named_parameters() if not torch.equal(p, before[key])}
    assert changed == {key for key in before if is_adapter(key)} | beside
    assert len([key for key in changed if is_adapter(key)]) == 2 * 2 * len(targets)
    plain.load_state_dict(merged({key: p.detach() for key, p in adapted.named_parameters()}, adapters))
    torch.testing.assert_close(run(plain), run(adapted), rtol=1e-12, atol=1e-12)


def test_targets_that_blocks_do_not_have_are_named() -> None:
    with pytest.raises(ValueError, match="name gate, and its blocks have down, key, output, query, up, value; name th"):
        adapt(ImageEncoder(EncoderConfig(**SIZES)), LowRank(2, 4.0, ["query", "gate"]))


def test_merging_rounds_once() -> None:
    generator = torch.Generator().manual_seed(2)
    base, down, up = (torch.randn(shape, generator=generator) for shape in ((4, 5), (3, 5), (4, 3)))
    state = {"a.weight": base.bfloat16(), "a.lora_down.weight": down, "a.lora_up.weight": up}
    found = merged(state, LowRank(3, 6.0, ["a"]))
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], (base.bfloat16().float() + 2 * up @ down).bfloat16())


def test_the_files_are_those_of_peft(tmp_path: Path) -> None:
    state = {name: p.detach() for name, p in backbone(ADAPTERS).named_parameters()}
    base = tmp_path / "base"
    export_pretrained(base, CONFIG, merged(state, ADAPTERS), usage=USAGE)
    assert export_adapter(tmp_path / "a", CONFIG, state, ADAPTERS, base=base) == ["query.weight"]
    described = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert described == {
        "base_model_name_or_path": str(base), "bias": "none", "lora_alpha": 12.0, "lora_dropout": 0.0,
        "peft_type": "LORA", "r": 3, "target_modules": ["down_proj", "q_proj", "v_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 3
    query = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert torch.equal(tensors[query], state["layers.1.attention.query.lora_down.weight"])
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (32, 3)
    with pytest.raises(PretrainedError, match="is there already"):
        export_adapter(tmp_path / "a", CONFIG, state, ADAPTERS)


def random_adapters(adapters: LowRank, config: BackboneConfig = CONFIG) -> dict[str, Tensor]:
    """All parameters of a backbone, whose adapters change something."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) / 8 if is_adapter(name) else p.detach()
        for name, p in backbone(adapters, config).named_parameters()
    }


def phi3_folder(folder: Path, state: dict[str, Tensor]) -> Path:
    """A model whose projections of a layer lie in one tensor."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "pad_token_id": 0}
    transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **heads)).save_pretrained(folder / "like")
    plain = {name: value for name, value in state.items() if not is_adapter(name)}
    export_pretrained(folder / "base", CONFIG, plain, base=folder / "like", usage=USAGE)
    return folder / "base"


def test_one_adapter_stands_for_those_of_layers_whose_weights_lie_in_one_tensor(tmp_path: Path) -> None:
    """Its scale is that of each; rows of layers without an adapter stay."""
    adapters = LowRank(3, 12.0, ["query", "value", "up", "down"])
    state = random_adapters(adapters)
    base = phi3_folder(tmp_path, state)
    export_adapter(tmp_path / "a", CONFIG, state, adapters, base=base)
    export_pretrained(tmp_path / "merged", CONFIG, merged(state, adapters), base=base, usage=USAGE)
    described = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["down_proj", "gate_up_proj", "qkv_proj"]
    assert (described["rank_pattern"], described["alpha_pattern"]) == ({"qkv_proj": 6}, {"qkv_proj": 24.0})
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    changed = 0
    for name, weight in before.items():
        down = tensors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
        if down is not None:
            up = tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
            rank = described["rank_pattern"].get(name.split(".")[-2], 3)
            alpha = described["alpha_pattern"].get(name.split(".")[-2], 12.0)
            assert len(down) == rank
            weight = weight + alpha / rank * up @ down
            changed += 1
        torch.testing.assert_close(after[name], weight, rtol=1e-12, atol=1e-12)
    assert changed == 2 * 3


def test_adapters_of_an_encoder_are_not_written_alone(tmp_path: Path) -> None:
    network = ImageEncoder(EncoderConfig(**(SIZES | KINDS["siglip"])))
    adapters = LowRank(2, 4.0, ["query"])
    adapt(network, adapters)
    with pytest.raises(PretrainedError, match="this is a siglip_vision_model; leave --adapter out, which merges them"):
        export_adapter(tmp_path / "a", network.config, network.state_dict(), adapters)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3", "mistral", "gemma", "gemma3"])
def test_peft_computes_what_merged_weights_do(kind: str, tmp_path: Path, python_with: Callable[[str], Path]) -> None:
    python = python_with("peft")
    changes = {name: value for name, value in BACKBONES.get(kind, {}).items() if name != "two_way_images"}
    config = replace(CONFIG, **changes)
    state = random_adapters(ADAPTERS, config)
    base, adapter, whole = (tmp_path / name for name in ("base", "adapter", "merged"))
    if kind == "phi3":
        phi3_folder(tmp_path, state)
    else:
        plain = {name: value for name, value in state.items() if not is_adapter(name)}
        export_pretrained(base, config, plain, usage=USAGE)
    export_adapter(adapter, config, state, ADAPTERS, base=base)
    export_pretrained(whole, config, merged(state, ADAPTERS), base=base, usage=USAGE)
    done = subprocess.run(
        [python, "-c", WITH_PEFT, base, adapter, whole], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
