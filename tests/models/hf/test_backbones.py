"""Backbones of transformers in our models, and back: the same logits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from faults.disk import missing, small_disk
from models.hf.tiny import BACKBONES, VOCAB, make_backbone, our_backbone, our_batch, our_logits, save
from safetensors.torch import load_file, save_file

from dataserver.outputs import OutputError
from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.hf import (
    PretrainedError,
    Usage,
    export_adapter,
    export_pretrained,
    load_into,
    load_pretrained,
)
from trainclient.models.lora import LowRank

USAGE = Usage(bos=3, eos=4, seq_len=512, max_patches=64)
IDS = torch.randint(0, VOCAB, (2, 41), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def their_logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids).logits
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BACKBONES)
def test_logits_are_those_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In float64 to 1e-6 only: transformers turns positions in float32."""
    theirs = make_backbone(name, dtype)
    found = load_pretrained(save(theirs, tmp_path / "there"))
    ours = our_backbone(found)
    expected = their_logits(theirs)
    assert expected.std() > 0.1
    bound = 1e-5 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(our_logits(ours, IDS), expected, rtol=bound, atol=bound)
    state = {key: value.clone() for key, value in ours.state_dict().items()}
    assert export_pretrained(tmp_path / "back", found.config, state, usage=USAGE) == []
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=dtype, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    near = bound * 2 if name.startswith("gemma") else bound / 10  # it norms in float32, and scales by a rounded root
    torch.testing.assert_close(their_logits(again.eval()), expected, rtol=near, atol=near)
    assert load_pretrained(tmp_path / "back").config == found.config


@pytest.mark.long
@pytest.mark.parametrize("name", BACKBONES)
def test_logits_are_those_of_transformers_at_1024_positions(name: str, tmp_path: Path) -> None:
    """Its cosines are off by 4e-5 at the last ones, for it turns positions in float32; Gemma 3 shows it most."""
    theirs = make_backbone(name)
    ours = our_backbone(load_pretrained(save(theirs, tmp_path / "c")))
    ids = torch.randint(0, VOCAB, (1, 1024), generator=torch.Generator().manual_seed(5))
    bound = 5e-5 if name == "gemma3" else 1e-5
    torch.testing.assert_close(our_logits(ours, ids), their_logits(theirs, ids), rtol=bound, atol=bound)


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = make_backbone("qwen2")
    ours = our_backbone(load_pretrained(save(theirs, tmp_path / "c")))
    labels = torch.full_like(IDS, -100)
    labels[:, :-1] = IDS[:, 1:]
    batch = our_batch(IDS)
    labelled = BackboneBatch(**{f: getattr(batch, f) for f in batch.__slots__} | {"labels": labels.flatten()})
    loss = ours(labelled).loss_sum / (labels >= 0).sum()
    torch.testing.assert_close(loss, theirs(input_ids=IDS, labels=IDS).loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_pipeline_stage_reads_its_own_parameters(num_stages: int, tmp_path: Path) -> None:
    theirs = make_backbone("llama 3.1")
    folder = save(theirs, tmp_path / "c", max_shard_size="30KB")
    assert (folder / "model.safetensors.index.json").is_file()
    config = load_pretrained(folder, names=()).config
    assert isinstance(config, BackboneConfig)
    hidden = None
    for stage in range(num_stages):
        module = BackboneStage(config, stage, num_stages)
        names = {name for name, _ in module.named_parameters()}
        found = load_pretrained(folder, names)
        assert set(found.state) == names
        assert load_into(module, found.state) == []
        with torch.no_grad():
            x = module._embed(our_batch(IDS), None, None) if hidden is None else hidden
            hidden = module._run_layers(x, our_batch(IDS))
    torch.testing.assert_close(
        module.head(module.norm(hidden)).view(*IDS.shape, -1), their_logits(theirs), rtol=1e-5, atol=1e-5
    )


def test_weights_in_bfloat16_stay_as_they_are(tmp_path: Path) -> None:
    theirs = make_backbone("qwen2", torch.bfloat16)
    found = load_pretrained(save(theirs, tmp_path / "c"))
    assert {tensor.dtype for tensor in found.state.values()} == {torch.bfloat16}
    export_pretrained(tmp_path / "back", found.config, found.state, usage=USAGE)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_tied_head_is_the_embedding_and_gets_both_gradients(tmp_path: Path) -> None:
    theirs = make_backbone("llama, tied")
    found = load_pretrained(save(theirs, tmp_path / "c"))
    ours = our_backbone(found)
    assert "head.weight" not in dict(ours.named_parameters())
    batch = our_batch(IDS)
    labels = torch.cat([IDS[:, 1:], torch.full((len(IDS), 1), -100)], dim=1)
    labelled = BackboneBatch(**{f: getattr(batch, f) for f in batch.__slots__} | {"labels": labels.flatten()})
    loss = ours(labelled).loss_sum
    assert loss is not None
    loss.backward()
    (theirs(input_ids=IDS, labels=IDS).loss * (labels >= 0).sum()).backward()
    torch.testing.assert_close(ours.embed.weight.grad, theirs.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-4)
    export_pretrained(tmp_path / "back", found.config, found.state, base=tmp_path / "c")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_head_that_is_no_copy_of_the_embedding_it_is_said_to_be(tmp_path: Path) -> None:
    folder = save(make_backbone("llama, tied"), tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    load_pretrained(folder)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PretrainedError, match=r"such as lm_head\.weight: its architecture is another"):
        load_pretrained(folder)


def test_the_last_stage_has_a_tied_head_under_the_name_of_the_embedding(tmp_path: Path) -> None:
    found = load_pretrained(str(save(make_backbone("qwen3, tied"), tmp_path / "c")))
    assert isinstance(found.config, BackboneConfig)
    stages = [BackboneStage(found.config, stage, 2) for stage in range(2)]
    assert all(load_into(stage, found.state) == [] for stage in stages)
    assert torch.equal(stages[0].embed.weight, stages[1].head_weight)
    with torch.no_grad():
        x = stages[0]._run_layers(stages[0]._embed(our_batch(IDS), None, None), our_batch(IDS))
        x = stages[1].norm(stages[1]._run_layers(x, our_batch(IDS)))
    logits = torch.nn.functional.linear(x, stages[1].head_weight).view(*IDS.shape, -1)
    torch.testing.assert_close(logits, our_logits(our_backbone(found), IDS))


def test_query_tokens_are_not_in_such_checkpoints(tmp_path: Path) -> None:
    found = load_pretrained(save(make_backbone("llama"), tmp_path / "c"))
    config = BackboneConfig(**{**{f: getattr(found.config, f) for f in found.config.__slots__}, "query_tokens": 4})
    model = BackboneStage(config)
    assert load_into(model, found.state) == ["query.weight"]
    assert export_pretrained(tmp_path / "back", config, model.state_dict(), usage=USAGE) == ["query.weight"]


def test_shards_and_companions_of_an_export(tmp_path: Path) -> None:
    base = save(make_backbone("llama"), tmp_path / "c")
    (base / "tokenizer.json").write_text("{}")
    (base / "notes.txt").write_text("stays")
    fields = json.loads((base / "config.json").read_text()) | {"eos_token_id": [5, 7], "max_position_embeddings": 77}
    (base / "config.json").write_text(json.dumps(fields))
    found = load_pretrained(base)
    export_pretrained(tmp_path / "back", found.config, found.state, base=base, shard_bytes=20_000)
    names = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert "tokenizer.json" in names
    assert "notes.txt" not in names
    assert "model-00001-of-00008.safetensors" in names
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.config.eos_token_id == [5, 7]
    assert again.config.max_position_embeddings == 77
    torch.testing.assert_close(their_logits(again.eval()), our_logits(our_backbone(found), IDS), rtol=1e-5, atol=1e-5)
    assert not list(tmp_path.glob(".partial-*"))


def test_the_older_names_of_rotary_fields(tmp_path: Path) -> None:
    """As checkpoints of 2023 and 2024 have them."""
    folder = save(make_backbone("llama 3.1"), tmp_path / "c")
    config = load_pretrained(folder).config
    fields = json.loads((folder / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(fields))
    assert load_pretrained(folder).config == config
    rope["type"] = rope.pop("rope_type")
    (folder / "config.json").write_text(json.dumps(fields))
    assert load_pretrained(folder).config == config


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "t5"}, "model_type is 't5'; one of llama, mistral, qwen2"),
        ("llama", {"model_type": "mamba"}, "model_type is 'mamba'; it cannot be trained here: it has linear attention"),
        ("llama", {"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ("llama", {"model_type": None}, "model_type is None"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; 'silu' is required: our MLP is SwiGLU"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True; False is required"),
        ("llama", {"attention_bias": 1}, "attention_bias is 1; true or false is required"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1; 0 is required"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is .*take the original"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'; our models have"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is None; a positive number is required"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\]; an object is required"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; an integer from 1 to 1024"),
        ("llama", {"num_hidden_layers": 2}, "tensors that no llama has, such as model.layers.2."),
        ("llama", {"num_hidden_layers": 4}, "does not hold model.layers.3.input_layernorm.weight; shape"),
        ("llama", {"hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ("llama", {"hidden_size": "32"}, "hidden_size is '32'; an integer"),
        ("llama", {"hidden_size": 36, "head_dim": 8}, r"holds shape \[97, 32\] for model.embed_tokens.weight"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a positive number"),
        ("llama", {"attention_bias": True}, "does not hold model.layers.0.self_attn.q_proj.bias"),
        ("llama, tied", {"tie_word_embeddings": False}, "does not hold lm_head.weight"),
        ("llama with biases and wide heads", {"attention_bias": False}, "no llama has, such as .*bias"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True; False is required"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types is .*full_attention is required"),
        ("phi3", {"rope_scaling": {"type": "su"}, "rope_parameters": None}, "type is 'su'; default is required: such"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope"}},
            r"the longest sequence .*take the model for",
        ),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75; 1.0 is required"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1; 0 is required"),
        ("phi3", {"num_key_value_heads": 1}, r"shape \[48, 32\] is required"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation is 'relu'; our models have gelu"),
        ("gemma", {"model_type": "gemma2"}, "'gemma2'; it cannot be trained here: it caps scores"),
        ("qwen2", {"model_type": "llama"}, "no llama has, such as model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_what_our_models_cannot_be(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(make_backbone(name), tmp_path / "c")
    fields = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(PretrainedError, match=message):
        load_pretrained(folder)


def test_exports_that_no_architecture_is(tmp_path: Path) -> None:
    found = load_pretrained(save(make_backbone("qwen2"), tmp_path / "c"))
    fields = {f: getattr(found.config, f) for f in found.config.__slots__}
    llama = load_pretrained(save(make_backbone("llama"), tmp_path / "l"))
    wide = BackboneConfig(**{**fields, "head_dim": 16})
    with pytest.raises(PretrainedError, match="head_dim is 16; qwen2 of width 32 with 4 heads has 8"):
        export_pretrained(tmp_path / "back", wide, found.state, usage=USAGE)
    odd = BackboneConfig(**{**fields, "qkv_bias": False, "output_bias": True})
    with pytest.raises(PretrainedError, match="llama has both or neither"):
        export_pretrained(tmp_path / "back", odd, found.state, usage=USAGE)
    with pytest.raises(PretrainedError, match="is a qwen2, and the model a llama"):
        export_pretrained(tmp_path / "back", llama.config, llama.state, base=tmp_path / "c")
    with pytest.raises(PretrainedError, match=r"there is nothing for embed\.weight"):
        export_pretrained(tmp_path / "back", found.config, {}, usage=USAGE)
    cut = found.state | {"head.weight": found.state["head.weight"][1:]}
    with pytest.raises(PretrainedError, match=r"there is \[96, 32\] for head.weight; .* \[97, 32\]"):
        export_pretrained(tmp_path / "back", found.config, cut, usage=USAGE)
    with pytest.raises(PretrainedError, match="is there already"):
        export_pretrained(tmp_path / "c", found.config, found.state, usage=USAGE)
    assert not (tmp_path / "back").exists()


def test_the_first_gemma_with_the_activation_that_released_files_name(tmp_path: Path) -> None:
    """They say gelu, and mean its approximation."""
    folder = save(make_backbone("gemma"), tmp_path / "c")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"hidden_act": "gelu", "hidden_activation": None}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = our_backbone(load_pretrained(folder))
    torch.testing.assert_close(our_logits(ours, IDS), their_logits(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "llama 3.1", "llama, stretched"])
def test_special_tokens_and_positions_of_an_export_without_a_base(name: str, tmp_path: Path) -> None:
    """Transformers would take 1, 2 and 2048 where nothing is written; generation follows from the same."""
    found = load_pretrained(save(make_backbone(name), tmp_path / "c"))
    assert isinstance(found.config, BackboneConfig)
    assert found.config.positions > 0
    for config, positions in ((found.config, found.config.positions), (replace(found.config, positions=0), 512)):
        folder = tmp_path / f"back-{positions}"
        export_pretrained(folder, config, found.state, usage=USAGE)
        written = json.loads((folder / "config.json").read_text())
        assert written["pad_token_id"] is None, "no job pads"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for told in (model.config, model.generation_config):
            assert (told.bos_token_id, told.eos_token_id, told.pad_token_id) == (3, 4, None)
        assert model.config.max_position_embeddings == positions
        ids = model.generate(IDS[:1, :3], max_new_tokens=2, do_sample=False)
        assert ids.shape[1] > 3


@pytest.mark.parametrize(
    ("theirs", "exported"),
    [({"eos_token_id": 4}, 4), ({"eos_token_id": [7, 4]}, [7, 4]), ({"eos_token_id": 7}, [4, 7]),
     ({"eos_token_id": [7, 8]}, [4, 7, 8]), ({"eos_token_id": None}, 4)],
)  # fmt: skip
def test_special_tokens_of_an_export_with_a_base(theirs: dict[str, Any], exported: Any, tmp_path: Path) -> None:
    """What the job trained with ends a text, whatever else does."""
    base = save(make_backbone("llama"), tmp_path / "c")
    fields = json.loads((base / "config.json").read_text()) | {"bos_token_id": 9, "pad_token_id": 5, **theirs}
    (base / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 100}))
    (base / "generation_config.json").write_text(json.dumps({"bos_token_id": 9, "top_p": 0.5, **theirs}))
    found = load_pretrained(base)
    assert isinstance(found.config, BackboneConfig)
    export_pretrained(tmp_path / "back", replace(found.config, positions=200), found.state, base=base, usage=USAGE)
    config, generation = (
        json.loads((tmp_path / "back" / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    for told in (config, generation):
        assert (told["bos_token_id"], told["eos_token_id"]) == (3, exported)
    assert (config["pad_token_id"], generation["top_p"]) == (5, 0.5)
    assert config["max_position_embeddings"] == 200, "those that the weights were taught"
    export_pretrained(tmp_path / "of preset", replace(found.config, positions=0), found.state, base=base, usage=USAGE)
    assert json.loads((tmp_path / "of preset" / "config.json").read_text())["max_position_embeddings"] == 512


def test_an_export_of_which_nobody_says_the_tokens(tmp_path: Path) -> None:
    found = load_pretrained(save(make_backbone("llama"), tmp_path / "c"))
    with pytest.raises(
        PretrainedError, match="does not say what its job's tokenizer and longest sequence are; give --base"
    ):
        export_pretrained(tmp_path / "back", found.config, found.state)
    (tmp_path / "c" / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n")
    with pytest.raises(PretrainedError, match=r"tokenizer\.json is a pointer of git-lfs; run"):
        export_pretrained(tmp_path / "back", found.config, found.state, base=tmp_path / "c")
    assert not (tmp_path / "back").exists()


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("kibibytes", [8, 90])
def test_a_full_disk_leaves_nothing_of_an_export(kibibytes: int, tmp_path: Path) -> None:
    """In its first file and in a later one."""
    found = load_pretrained(save(make_backbone("llama"), tmp_path / "c"))
    query = "layers.0.attention.query"
    state = {f"{query}.lora_down.weight": torch.ones(3000, 32), f"{query}.lora_up.weight": torch.ones(32, 3000)}
    with small_disk(tmp_path / "disk", kibibytes) as disk:
        said = (
            rf"the folder {disk}/a/out cannot be written \(No space left on device\); name a folder that is not there"
        )
        with pytest.raises(OutputError, match=said):
            export_pretrained(disk / "a" / "out", found.config, found.state, shard_bytes=20_000, usage=USAGE)
        with pytest.raises(OutputError, match=said):
            export_adapter(disk / "a" / "out", found.config, state, LowRank(3000, 1.0, ["query"]))
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize(("name", "kind"), [("mistral", "MistralForCausalLM"), ("phi3", "Phi3ForCausalLM")])
def test_what_has_the_sizes_of_a_llama_goes_back_into_its_form(name: str, kind: str, tmp_path: Path) -> None:
    """Without windows: the base decides."""
    folder = save(make_backbone(name), tmp_path / "c")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": None}))
    found = load_pretrained(folder)
    export_pretrained(tmp_path / "back", found.config, found.state, base=folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is getattr(transformers, kind)
    assert again.config.sliding_window is None
    assert load_pretrained(tmp_path / "back").config == found.config
