"""Adapters of backbones that transformers made: merged, exported, and run by it, they are what ours compute."""

from pathlib import Path

import pytest
import torch
import transformers
from models.hf.test_backbones import IDS, their_logits
from models.hf.tiny import make_backbone, our_backbone, our_logits, save
from torch.testing import assert_close

from trainclient.models.backbone import BackboneStage
from trainclient.models.hf import export_pretrained, load_into, load_pretrained
from trainclient.models.lora import LowRank, adapt, is_adapter, merged

ADAPTERS = LowRank(2, 8.0, ["query", "key", "value", "output", "gate", "up", "down"])


@pytest.mark.parametrize("name", ["qwen3", "mistral with windows", "gemma3"])
def test_merged_weights_are_what_adapters_compute(name: str, tmp_path: Path) -> None:
    """With norms of queries and keys, Gemma's norms, and windows."""
    found = load_pretrained(save(make_backbone(name, torch.float64), tmp_path / "c"))
    adapted, generator = BackboneStage(found.config), torch.Generator().manual_seed(2)
    adapt(adapted, ADAPTERS)
    adapted.double()
    assert all(is_adapter(missing) for missing in load_into(adapted, found.state))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if is_adapter(key):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    made = our_logits(adapted, IDS)
    assert float((made - our_logits(our_backbone(found), IDS)).abs().max()) > 0.1
    state = merged({key: p.detach() for key, p in adapted.named_parameters()}, ADAPTERS)
    assert export_pretrained(tmp_path / "merged", found.config, state, base=tmp_path / "c") == []
    assert_close(our_logits(our_backbone(load_pretrained(tmp_path / "merged")), IDS), made, rtol=1e-12, atol=1e-12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert_close(their_logits(theirs), made, rtol=1e-5, atol=1e-5)  # it turns positions in float32
