"""Low-rank adapters: what they change, what is trained, and that merged weights compute the same."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.hf import PretrainedError, Usage, export_adapter, export_pretrained
from trainclient.models.lora import LowRank, adapt, is_adapter, merged
from trainclient.models.parameters import initialise

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


def backbone(adapters: LowRank | None) -> BackboneStage:
    network = BackboneStage(CONFIG)
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


def test_merging_rounds_once() -> None:
    generator = torch.Generator().manual_seed(2)
    base, down, up = (torch.randn(shape, generator=generator) for shape in ((4, 5), (3, 5), (4, 3)))
    state = {"a.weight": base.bfloat16(), "a.lora_down.weight": down, "a.lora_up.weight": up}
    found = merged(state, LowRank(3, 6.0, ["a"]))
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], (base.bfloat16().float() + 2 * up @ down).bfloat16())


def test_the_files_are_those_of_peft(tmp_path: Path) -> None:
    state = {name: p.detach() for name, p in backbone(ADAPTERS).named_parameters()}
    assert export_adapter(tmp_path / "a", CONFIG, state, ADAPTERS, base=Path("/hf/base")) == ["query.weight"]
    described = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert described == {
        "base_model_name_or_path": "/hf/base", "bias": "none", "lora_alpha": 12.0, "lora_dropout": 0.0,
        "peft_type": "LORA", "r": 3, "target_modules": ["down_proj", "q_proj", "v_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 3
    query = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert torch.equal(tensors[query], state["layers.1.attention.query.lora_down.weight"])
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (32, 3)
    with pytest.raises(PretrainedError, match="is there already"):
        export_adapter(tmp_path / "a", CONFIG, state, ADAPTERS)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_peft_computes_what_merged_weights_do(tmp_path: Path, python_with: Callable[[str], Path]) -> None:
    python = python_with("peft")
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) / 8 if is_adapter(name) else p.detach()
        for name, p in backbone(ADAPTERS).named_parameters()
    }
    base, adapter, whole = (tmp_path / name for name in ("base", "adapter", "merged"))
    export_pretrained(base, CONFIG, {name: value for name, value in state.items() if not is_adapter(name)}, usage=USAGE)
    export_adapter(adapter, CONFIG, state, ADAPTERS, base=base)
    export_pretrained(whole, CONFIG, merged(state, ADAPTERS), usage=USAGE)
    done = subprocess.run(
        [python, "-c", WITH_PEFT, base, adapter, whole], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
