"""Floating-point operations that modules count, from their definition."""

from typing import Any

import numpy as np
import torch
from torch import nn

from dataserver.planning.job.fields import ModelSize
from trainclient.models.backbone import BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.modules import NoiseKey, View
from trainclient.modules.backbone import Backbone
from trainclient.modules.encoder import Encoder
from trainclient.modules.generator import Generator
from trainclient.modules.work import forward_flops
from trainclient.program.runner import Work
from trainclient.stream.microbatch import Items

LENGTHS = (3, 0, 5)
OFFSETS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
PAIRS, TOTAL = 34, 8


def view(**tensors: torch.Tensor) -> View:
    none = np.zeros(0, np.int64)
    return View(tensors, Items(none, none, none.view(np.uint64), none, none.astype(np.uint8)), NoiseKey(0, ()))


def meta(make: Any, *arguments: Any) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = make(*arguments)
    return module


def test_modules_count_products_with_weights_and_attention() -> None:
    """Two operations for each weight and row; attention takes 4 x width for each pair, a causal one half of that."""
    encoder: Any = meta(ImageEncoder, EncoderConfig(2, 16, 2, 48, patch=4, merge=1, output_dim=8))
    weights = 2 * (4 * 16 * 16 + 2 * 16 * 48)
    found = Encoder(encoder).forward_flops(view(cu_patches=OFFSETS))
    assert found == 2 * weights * TOTAL + 2 * 4 * 16 * PAIRS

    generator: Any = meta(ImageGenerator, GeneratorConfig(2, 16, 2, 48, patch=4, merge=1, condition_dim=8))
    crossing = 2 * 2 * 16 * 16
    found = Generator(generator).forward_flops(view(cu_patches=OFFSETS))
    assert found == 2 * (weights + crossing) * TOTAL + 2 * 4 * 16 * PAIRS

    config = BackboneConfig(4, 16, 48, heads=4, groups=2, rotary_base=1e4, vocab_size=100, query_tokens=0)
    weights = 4 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 48) + 16 * 100
    for chunk in range(2):  # each says what the whole backbone computes
        stage: Any = meta(BackboneStage, config, chunk, 2)
        module, seen = Backbone(stage), view(cu_lengths=OFFSETS)
        assert module.forward_flops(seen) == 2 * weights * TOTAL + 4 * 4 * 16 * PAIRS // 2
        assert module.num_tokens(seen) == TOTAL


def test_an_empty_view_asks_for_nothing() -> None:
    assert forward_flops("encoder", ModelSize(2, 16, 48, 2, 2), torch.tensor([0])) == 0


def test_what_one_module_does_not_count_nobody_knows() -> None:
    assert Work(1, 2).plus(Work(3, 4)) == Work(4, 6)
    assert Work(1, 2).plus(Work(3, None)) == Work(4, None)
    assert Work(1, None).plus(Work(3, 4)) == Work(4, None)
