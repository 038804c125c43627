"""Named sizes, their parameter counts, and initial values."""

import pytest
import torch
from torch import nn

from trainclient.models.parameters import fill_missing_gradients, initialise
from trainclient.models.presets import (
    BACKBONES,
    ENCODERS,
    GENERATORS,
    Placement,
    backbone_config,
    build_backbone,
    build_encoder,
    build_generator,
    encoder_config,
    encoder_trunk_parameters,
    generator_config,
    num_parameters,
)

META = Placement(device="meta")


def count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_count_is_that_of_the_module(name: str) -> None:
    module = build_encoder(name, 14, 2, 512, seed=0, prefix="encoder", placement=META)
    assert num_parameters(encoder_config(name, 14, 2, 512)) == count(module)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("query_tokens", [0, 64])
def test_backbone_count_is_that_of_its_stages(name: str, query_tokens: int) -> None:
    stages = [
        build_backbone(name, 1000, query_tokens, stage, 3, seed=0, prefix="backbone", placement=META)
        for stage in range(3)
    ]
    assert num_parameters(backbone_config(name, 1000, query_tokens)) == count(*stages)


@pytest.mark.parametrize("name", GENERATORS)
def test_generator_count_is_that_of_the_module(name: str) -> None:
    module = build_generator(name, 14, 2, 512, seed=0, prefix="generator", placement=META)
    assert num_parameters(generator_config(name, 14, 2, 512)) == count(module)


def test_presets_have_the_sizes_of_the_papers() -> None:
    counts = {
        0.63e9: encoder_trunk_parameters(encoder_config("vit-h", 14, 2, 4096)),
        6.7e9: num_parameters(backbone_config("llama3-7b", 32000, 64)),
        13e9: num_parameters(backbone_config("llama3-13b", 32000, 64)),
        70e9: num_parameters(backbone_config("llama3-70b", 128256, 64)),
        1e9: num_parameters(generator_config("dit-1b", 14, 2, 4096)),
    }
    for published, ours in counts.items():
        assert abs(ours / published - 1) < 0.05, (published, ours)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no encoder named 'huge'; choose one of tiny, vit-h"):
        encoder_config("huge", 14, 2, 64)
    with pytest.raises(ValueError, match="no backbone named 'gpt'"):
        build_backbone("gpt", 10, 0, seed=0, prefix="backbone")
    with pytest.raises(ValueError, match="no generator named 'gan'"):
        generator_config("gan", 14, 2, 64)


def test_initial_values_do_not_depend_on_the_split() -> None:
    whole = build_backbone("tiny", 50, 4, seed=1, prefix="backbone").state_dict()
    for num_stages in (2, 4):
        split: dict[str, torch.Tensor] = {}
        for stage in range(num_stages):
            split |= build_backbone("tiny", 50, 4, stage, num_stages, seed=1, prefix="backbone").state_dict()
        assert split.keys() == whole.keys()
        assert all(torch.equal(split[name], whole[name]) for name in whole)


def test_initial_values_depend_on_seed_prefix_and_name() -> None:
    def weights(seed: int, prefix: str) -> dict[str, torch.Tensor]:
        return build_encoder("tiny", 4, 2, 64, seed=seed, prefix=prefix).state_dict()

    base = weights(1, "encoder")
    name = "layers.0.attention.qkv.weight"
    assert torch.equal(base[name], weights(1, "encoder")[name])
    for other in (weights(2, "encoder")[name], weights(1, "second")[name], base["layers.1.attention.qkv.weight"]):
        assert not torch.isclose(base[name], other).any(dim=1).all()


def test_initial_values_are_the_same_numbers_in_every_dtype() -> None:
    single = build_generator("tiny", 4, 2, 64, seed=1, prefix="generator").state_dict()
    for dtype in (torch.float64, torch.bfloat16):
        placement = Placement(dtype=dtype)
        other = build_generator("tiny", 4, 2, 64, seed=1, prefix="generator", placement=placement).state_dict()
        assert all(torch.equal(other[name], single[name].to(dtype)) for name in single)


def test_initial_values_have_the_documented_scale() -> None:
    values = build_generator("tiny", 4, 2, 64, seed=1, prefix="generator").state_dict()
    assert values["layers.0.mlp.down.weight"].std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert values["modulation.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert values["layers.0.modulation_table"].std().item() == pytest.approx(0.02, rel=0.2)
    assert not values["output.bias"].any()
    backbone = build_backbone("tiny", 500, 4, seed=1, prefix="backbone").state_dict()
    assert backbone["embed.weight"].std().item() == pytest.approx(1, rel=0.05)
    assert (backbone["norm.weight"] == 1).all()


def test_a_module_without_memory_is_refused() -> None:
    module = build_encoder("tiny", 4, 2, 64, seed=0, prefix="encoder", placement=META)
    with pytest.raises(ValueError, match=r"encoder\.patch_embed\.weight has no memory yet"):
        initialise(module, 0, "encoder")


def test_missing_gradients_become_zero_and_others_stay() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    module["frozen"].requires_grad_(False)
    module["used"](torch.ones(1, 2)).sum().backward()
    fill_missing_gradients(module)
    assert torch.equal(module["used"].weight.grad, torch.ones(2, 2))
    assert torch.equal(module["unused"].weight.grad, torch.zeros(2, 2))
    assert module["frozen"].weight.grad is None
