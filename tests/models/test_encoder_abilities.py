"""What single families need of an encoder, each by itself in float64: rows and gradients are those of the formulas."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from models.encoder_formulas import encoder_rows
from torch import Tensor
from torch.testing import assert_close

from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.learned_positions import SCALINGS

BOUND = 1e-12
SIZES = EncoderConfig(layers=2, width=16, heads=2, mlp_width=10, patch=2, merge=2, output_dim=6)
LEARNED: dict[str, Any] = {"position_grid": 4}
CLASS: dict[str, Any] = {**LEARNED, "class_token": True}
ABILITIES: dict[str, dict[str, Any]] = {
    "rotary positions and a merger": {},
    "RMSNorm": {"rms_norms": True},
    "gates": {"gated": True, "activation": "silu"},
    "GELU by tanh": {"activation": "gelu_tanh"},
    "GELU, quick": {"activation": "quick_gelu"},
    "layer scale": {"layer_scale": True},
    "windows": {"window": 1},
    "windows of some layers": {"window": 2, "global_layers": (1,)},
    "a second frame": {"second_frame": True, "patch_bias": False},
    "a class token": CLASS,
    "a class token without a norm": {**CLASS, "class_norm": False},
    "registers": {**CLASS, "registers": 2},
    "queries without biases": {"query_bias": False},
    "learned and rotary positions": {**LEARNED, "rotary": True, "position_scaling": "bilinear"},
    "a chosen layer beside the last": {"deepstack": (0,)},
    "all layers": {"deepstack": (0, 1)},
    **{f"learned positions, {scaling}": {**LEARNED, "position_scaling": scaling} for scaling in SCALINGS},
    **{f"a projector, {kind}": {"projector": kind} for kind in ("linear", "mlp", "normed_mlp", "pool")},
    "blocks of nine patches": {"merge": 3, "projector": "pool"},
}
GRIDS = {2: [(4, 6), (4, 4), (2, 2)], 3: [(3, 6), (6, 3)]}
"""By the merge. Four patches a side are those of the learned grid, others more and fewer."""


def pictures_of(config: EncoderConfig) -> list[Tensor]:
    generator, patch = torch.Generator().manual_seed(3), config.patch
    shapes = [(rows * patch, columns * patch, 3) for rows, columns in GRIDS[config.merge]]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]


def packed(config: EncoderConfig, pictures: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Patches block by block, grids and offsets, as views have them."""
    patch, merge, rows, grids = config.patch, config.merge, list[Tensor](), list[tuple[int, int]]()
    for picture in pictures:
        down, across = picture.shape[0] // patch, picture.shape[1] // patch
        blocks = [(r, c) for r in range(0, down, merge) for c in range(0, across, merge)]
        cells = [(r + dy, c + dx) for r, c in blocks for dy in range(merge) for dx in range(merge)]
        rows += [picture[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].flatten() for r, c in cells]
        grids.append((down, across))
    grid = torch.tensor(grids)
    return torch.stack(rows), grid, torch.cat([torch.zeros(1, dtype=torch.int64), grid.prod(1).cumsum(0)])


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 2


@pytest.mark.parametrize("ability", ABILITIES)
def test_an_ability_is_its_formula(ability: str) -> None:
    config = replace(SIZES, **ABILITIES[ability])
    encoder, pictures = ImageEncoder(config).double(), pictures_of(config)
    shapes = {name: p.shape for name, p in encoder.named_parameters()}
    values = {name: noise(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    encoder.load_state_dict(values)
    values = {name: value.requires_grad_() for name, value in values.items()}
    expected, made = encoder_rows(config, values, pictures), encoder(*packed(config, pictures))
    assert_close(made, expected, rtol=BOUND, atol=BOUND)
    weights = noise(*expected.shape, seed=77)
    wanted = torch.autograd.grad((expected * weights).sum(), list(values.values()))
    (made * weights).sum().backward()
    for (name, parameter), gradient in zip(encoder.named_parameters(), wanted, strict=True):
        assert_close(parameter.grad, gradient, rtol=BOUND, atol=BOUND, msg=lambda m, k=name: f"{k}: {m}")
