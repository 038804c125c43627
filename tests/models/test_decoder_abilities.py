"""What single families need of a decoder, each by itself in float64: loss and gradients are those of the formulas."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.decoder_formulas import Tokens, backbone_loss
from torch import Tensor
from torch.testing import assert_close

from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.rotary import RotaryScaling, RotarySections

BOUND = 1e-12
SIZES = BackboneConfig(
    layers=2, width=8, mlp_width=10, heads=2, groups=1, rotary_base=1e4, vocab_size=11, query_tokens=0, head_dim=12
)
ABILITIES: dict[str, dict[str, Any]] = {
    "a Llama": {},
    "norms that count from one": {"offset_norms": True},
    "norms of what is added": {"post_norms": True, "norm_eps": 1e-2},
    "norms of heads": {"head_norms": True},
    "norms of heads that count from one": {"head_norms": True, "offset_norms": True},
    "scaled embeddings": {"embed_scale": 8**0.5},
    "scaled scores": {"score_scale": 0.7},
    "gates of GELU": {"activation": "gelu_tanh"},
    "biases": {"qkv_bias": True, "output_bias": True},
    "windows": {"window": 3},
    "windows and rotations by layer": {
        "window": 3,
        "global_layers": (1,),
        "windowed_rotary_base": 100.0,
        "rotary_scaling": RotaryScaling(4.0),
    },
    "images that see themselves both ways": {"two_way_images": True},
    "the same in windows": {"two_way_images": True, "window": 3, "global_layers": (1,)},
    "positions of three axes": {"sections": RotarySections((1, 3, 2))},
    "positions of three axes in turn": {"sections": RotarySections((3, 2, 1), interleaved=True)},
    "wide rows": {"deepstack": 2},
    "a tied head": {"tied": True},
}
FIRST = Tokens(
    ids=[1, 2, 0, 0, 0, 0, 3, 4],
    labels=[2, -100, -100, -100, -100, 3, 4, 5],
    positions=[(0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3), (4, 4, 4), (5, 5, 5)],
    images=[-1, -1, 0, 0, 0, 0, -1, -1],
)
SECOND = Tokens(
    ids=[6, 0, 0, 0, 7, 10],
    labels=[-100, -100, -100, 7, 10, 8],
    positions=[(0, 0, 0), (1, 1, 1), (1, 1, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5)],
    images=[-1, 1, 1, 2, -1, -1],
)
"""Two images side by side, which do not see each other."""


def with_axes(config: BackboneConfig, tokens: Tokens) -> Tokens:
    """The tokens with the positions that such a model takes."""
    return tokens if config.sections else replace(tokens, positions=[(n,) for n in range(len(tokens.ids))])


def batch_of(config: BackboneConfig, several: list[Tokens]) -> BackboneBatch:
    """All sequences, packed."""
    images = torch.tensor([image for tokens in several for image in tokens.images])
    positions = torch.tensor([at for tokens in several for at in tokens.positions])
    return BackboneBatch(
        cu_lengths=torch.tensor([0, *(len(tokens.ids) for tokens in several)]).cumsum(0),
        position_ids=positions.T if config.sections else positions[:, 0],
        token_ids=torch.tensor([token for tokens in several for token in tokens.ids]),
        embedding_slots=(images >= 0).nonzero().squeeze(1),
        condition_slots=torch.zeros(0, dtype=torch.int64),
        labels=torch.tensor([label for tokens in several for label in tokens.labels]),
        image_blocks=images if config.two_way_images else None,
    )


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 2


def stages_of(config: BackboneConfig, count: int) -> tuple[list[BackboneStage], dict[str, Tensor]]:
    """All stages, with noise in every parameter, and the parameters of the whole."""
    stages = [BackboneStage(config, number, count).double() for number in range(count)]
    shapes = {name: p.shape for stage in stages for name, p in stage.named_parameters()}
    values = {name: noise(*shapes[name], seed=seed) for seed, name in enumerate(sorted(shapes))}
    for stage in stages:
        stage.load_state_dict({name: values[name] for name in stage.state_dict()})
    return stages, {name: value.requires_grad_() for name, value in values.items()}


def by_stages(
    stages: list[BackboneStage], batch: BackboneBatch, rows: Tensor
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """Loss, the gradients of the parameters, of those of several stages their sum, and that of the rows."""
    rows = rows.detach().clone().requires_grad_()
    output = stages[0](batch, embeddings=rows)
    for stage in stages[1:]:
        output = stage(batch, hidden=output.hidden)
    output.loss_sum.backward()
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    assert rows.grad is not None
    return output.loss_sum, found, rows.grad


def require_formulas(config: BackboneConfig, num_stages: int) -> None:
    """Compare a model in some stages with the formulas: loss, and the gradients of all parameters and of rows."""
    stages, values = stages_of(config, num_stages)
    sequences = [with_axes(config, tokens) for tokens in (FIRST, SECOND)]
    rows = noise(7, config.image_width, seed=99).requires_grad_()
    parts = zip(sequences, rows.split([4, 3]), strict=True)
    expected = torch.stack([backbone_loss(config, values, tokens, of) for tokens, of in parts]).sum()
    *wanted, of_rows = torch.autograd.grad(expected, [*values.values(), rows])
    loss, found, found_rows = by_stages(stages, batch_of(config, sequences), rows)
    assert_close(loss, expected, rtol=BOUND, atol=0)
    assert found.keys() == values.keys()
    for name, gradient in zip(values, wanted, strict=True):
        assert float(gradient.abs().max()) > 1e-4, f"{name} changes nothing"
        assert_close(found[name], gradient, rtol=BOUND, atol=BOUND, msg=lambda m, k=name: f"{k}: {m}")
    assert_close(found_rows, of_rows, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("ability", ABILITIES)
def test_an_ability_is_its_formula(ability: str) -> None:
    require_formulas(replace(SIZES, **ABILITIES[ability]), 1)


def test_a_tied_head_of_two_stages_has_the_gradients_of_one_parameter() -> None:
    """Both stages hold it, and what both find adds up."""
    config = replace(SIZES, tied=True)
    stages, _ = stages_of(config, 2)
    assert all("embed.weight" in dict(stage.named_parameters()) for stage in stages)
    require_formulas(config, 2)
