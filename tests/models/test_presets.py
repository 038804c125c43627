"""Named sizes and initial values."""

import pytest
import torch
from torch import nn

from trainclient.models.backbone import BackboneStage
from trainclient.models.encoder import ImageEncoder
from trainclient.models.generator import ImageGenerator
from trainclient.models.parameters import initialise
from trainclient.models.presets import backbone_config, encoder_config, generator_config

State = dict[str, torch.Tensor]


def encoder(seed: int, prefix: str = "encoder") -> State:
    return initial_values(ImageEncoder(encoder_config("tiny", 4, 2, 64)), seed, prefix)


def backbone(vocab_size: int, stage: int = 0, num_stages: int = 1) -> State:
    return initial_values(BackboneStage(backbone_config("tiny", vocab_size, 4), stage, num_stages), 1, "backbone")


def generator(dtype: torch.dtype = torch.float32) -> State:
    return initial_values(ImageGenerator(generator_config("tiny", 4, 2, 64)).to(dtype), 1, "generator")


def initial_values(module: nn.Module, seed: int, prefix: str) -> State:
    initialise(module, seed, prefix)
    return module.state_dict()


def test_presets_have_the_sizes_of_the_papers() -> None:
    with torch.device("meta"):
        modules = {
            0.63e9: ImageEncoder(encoder_config("vit-h", 14, 2, 4096)),
            6.7e9: BackboneStage(backbone_config("llama3-7b", 32000, 64)),
            13e9: BackboneStage(backbone_config("llama3-13b", 32000, 64)),
            70e9: BackboneStage(backbone_config("llama3-70b", 128256, 64)),
            1e9: ImageGenerator(generator_config("dit-1b", 14, 2, 4096)),
        }
    for published, module in modules.items():
        # A paper's ViT has no merger that fits its output to a backbone.
        names = (name for name, _ in module.named_parameters() if not name.startswith("merger."))
        ours = sum(module.get_parameter(name).numel() for name in names)
        assert abs(ours / published - 1) < 0.05, (published, ours)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no encoder named 'huge'; choose one of tiny, vit-h"):
        encoder_config("huge", 14, 2, 64)
    with pytest.raises(ValueError, match="no backbone named 'gpt'"):
        backbone_config("gpt", 10, 0)
    with pytest.raises(ValueError, match="no generator named 'gan'"):
        generator_config("gan", 14, 2, 64)


def test_initial_values_do_not_depend_on_the_split() -> None:
    whole = backbone(50)
    for num_stages in (2, 4):
        split: State = {}
        for stage in range(num_stages):
            split |= backbone(50, stage, num_stages)
        assert split.keys() == whole.keys()
        assert all(torch.equal(split[name], whole[name]) for name in whole)


def test_initial_values_depend_on_seed_prefix_and_name() -> None:
    base = encoder(1)
    name = "layers.0.attention.query.weight"
    assert torch.equal(base[name], encoder(1)[name])
    for other in (encoder(2)[name], encoder(1, "second")[name], base["layers.1.attention.query.weight"]):
        assert not torch.isclose(base[name], other).any(dim=1).all()


def test_initial_values_are_the_same_numbers_in_every_dtype() -> None:
    single = generator()
    for dtype in (torch.float64, torch.bfloat16):
        other = generator(dtype)
        assert all(torch.equal(other[name], single[name].to(dtype)) for name in single)


def test_initial_values_have_the_documented_scale() -> None:
    values = generator()
    assert values["layers.0.mlp.down.weight"].std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert values["modulation.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert values["layers.0.modulation_table"].std().item() == pytest.approx(0.02, rel=0.2)
    assert not values["output.bias"].any()
    stage = backbone(500)
    assert stage["embed.weight"].std().item() == pytest.approx(1, rel=0.05)
    assert (stage["norm.weight"] == 1).all()


def test_a_module_without_memory_is_refused() -> None:
    with torch.device("meta"):
        module = ImageEncoder(encoder_config("tiny", 4, 2, 64))
    with pytest.raises(ValueError, match=r"encoder\.patch_embed\.weight has no memory yet"):
        initialise(module, 0, "encoder")
