"""Models in bfloat16 are as near to float32 as those of transformers in bfloat16, and go back as they came.

Both round what each layer makes to 8 bits, transformers also angles and cosines, in another order: single logits then
differ by some roundings. What can be asked of ours is that the mean square of its errors, against the same weights in
float32, is no larger than that of transformers' own errors; both are sums of many roundings, so a third more is chance.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.hf.test_backbones import IDS, USAGE, their_logits
from models.hf.test_towers import PATCH, SQUARES, our_features, their_qwen, their_square
from models.hf.tiny import (
    BACKBONES,
    TOWERS,
    class_named,
    make_backbone,
    make_tower,
    our_backbone,
    our_encoder,
    our_logits,
    packed,
    pictures,
    save,
)
from models.hf.tiny_wholes import WHOLES, make_whole, our_loss, our_models, sample_of, their_loss
from torch import Tensor

from trainclient.models.hf import TrainedPart, export_pretrained, export_whole, load_pretrained

CHANCE = 4 / 3
QUICK = {"qwen2-vl", "gemma3", "qwen3", "phi3", "siglip2"}


def some(names: Any) -> list[Any]:
    """All names, most of them for long runs alone."""
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in names]


def loaded(loader: Any, folder: Path) -> tuple[Any, Any]:
    """A model as transformers loads it, in bfloat16, and the same weights in float32; angles are not rounded twice."""
    types = torch.bfloat16, torch.float32
    found = (loader.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval() for dtype in types)
    return next(found), next(found)


def require_as_near(ours: Tensor, theirs: Tensor, precise: Tensor) -> None:
    """Fail where ours are farther from the precise values than theirs."""
    assert ours.dtype == theirs.dtype == torch.bfloat16
    here, there = (float((found.float() - precise).square().mean().sqrt()) for found in (ours, theirs))
    assert there > 1e-4 * float(precise.std()), "nothing was rounded"
    assert here <= CHANCE * there
    assert here < 0.03 * float(precise.std())


@pytest.mark.parametrize("name", some(WHOLES))
def test_logits_of_whole_models(name: str, tmp_path: Path) -> None:
    make_whole(name, tmp_path / "c", torch.bfloat16)
    loader = transformers.AutoModelForImageTextToText
    theirs, plain = loaded(loader, tmp_path / "c")
    encoder, backbone = our_models(tmp_path / "c")
    sample = sample_of(name, encoder.config)
    with torch.no_grad():
        precise, _ = their_loss(name, plain, sample, encoder.config)
        rounded, _ = their_loss(name, theirs, sample, encoder.config)
        made, _ = our_loss(encoder, backbone, sample)
    require_as_near(made, rounded, precise)
    parts = [TrainedPart(m.config, m.state_dict()) for m in (encoder, backbone)]
    export_whole(tmp_path / "back", tmp_path / "c", parts)
    again, _ = loaded(loader, tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(their_loss(name, again, sample, encoder.config)[0], rounded)


@pytest.mark.parametrize("name", some(BACKBONES))
def test_logits_of_backbones(name: str, tmp_path: Path) -> None:
    found = load_pretrained(save(make_backbone(name, torch.bfloat16), tmp_path / "c"))
    theirs, plain = loaded(transformers.AutoModelForCausalLM, tmp_path / "c")
    rounded = their_logits(theirs)
    require_as_near(our_logits(our_backbone(found), IDS), rounded, their_logits(plain))
    export_pretrained(tmp_path / "back", found.config, found.state, usage=USAGE)
    again, _ = loaded(transformers.AutoModelForCausalLM, tmp_path / "back")
    assert torch.equal(their_logits(again), rounded)


@pytest.mark.parametrize("name", some(TOWERS))
def test_features_of_towers(name: str, tmp_path: Path) -> None:
    if name == "qwen2-vl of patch 8":
        pytest.skip("the same tower with other sizes; pictures here have patches of 4")
    found = load_pretrained(save(make_tower(name, torch.bfloat16), tmp_path / "c"))
    ours, _ = our_encoder(found)
    images = pictures([(6, 6), (4, 10)], PATCH)
    theirs, plain = loaded(class_named(TOWERS[name][1]), tmp_path / "c")
    if name in SQUARES:
        rounded, precise = (
            torch.cat(their_square(model, images, found.config.pixels, dtype))
            for model, dtype in ((theirs, torch.bfloat16), (plain, torch.float32))
        )
        made = torch.cat(our_features(ours, images, 2))
    else:
        rounded, precise = (
            their_qwen(model, images, dtype) for model, dtype in ((theirs, torch.bfloat16), (plain, torch.float32))
        )
        with torch.no_grad():
            made = ours(*packed(images, PATCH, 2))
    require_as_near(made, rounded, precise)
