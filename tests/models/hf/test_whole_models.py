"""Whole vision-language models of transformers in our encoder and backbone, and back: the same logits and gradients."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from models.encoder_formulas import encoder_hidden
from models.hf.tiny import packed, pictures
from models.hf.tiny_wholes import (
    ONEVISION_GRIDS,
    ONEVISION_SIZING,
    VOCAB,
    WHOLES,
    differing,
    gradient_bound,
    gradients_as_checkpoint,
    make_whole,
    our_loss,
    our_models,
    sample_of,
    their_loss,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import CONFIG_MAPPING

from dataserver.planning.job.fields import Sizing
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.hf import PretrainedError, TrainedPart, export_whole, load_into, load_pretrained
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.registry import FAMILIES, REFUSED, families_of
from trainclient.models.hf.whole_models import WHOLE_MODELS
from trainclient.models.patches import PIXELS

ONE_EACH = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "llava", "gemma3", "idefics3", "smolvlm", "onevision", "internvl")
LONG = [pytest.param(name, marks=[] if name in ONE_EACH else pytest.mark.long) for name in WHOLES]


def named(key: str) -> Callable[[str], str]:
    """A message that names a parameter."""
    return lambda message: f"{key}: {message}"


@pytest.mark.parametrize("name", LONG)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Every tensor has noise. Gradients are read by our names from a checkpoint that holds them."""
    theirs = make_whole(name, tmp_path / "c")
    encoder, backbone = our_models(tmp_path / "c")
    sample = sample_of(name, encoder.config)
    expected, loss = their_loss(name, theirs, sample, encoder.config)
    made, ours = our_loss(encoder, backbone, sample)
    assert expected.std() > 0.1
    assert_close(made, expected.detach(), rtol=1e-5, atol=1e-5)
    assert_close(ours, loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    ours.backward()
    folder = gradients_as_checkpoint(name, theirs, tmp_path / "g")
    for part, module, kind in (("vit", encoder, EncoderConfig), ("llm", backbone, BackboneConfig)):
        wanted = load_pretrained(folder, kind=kind).state
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None, key
            bound = gradient_bound(name, f"{part}.{key}", wanted[key])
            assert_close(parameter.grad, wanted[key], rtol=0, atol=bound, msg=lambda m, k=key: f"{k}: {m}")


def in_double(rope: dict[str, dict[str, float]], x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of Gemma 3 in layers of a kind, for heads of 16."""
    frequencies = rope[kind]["rope_theta"] ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.long
@pytest.mark.parametrize("name", ONE_EACH)
def test_logits_at_1024_positions_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Gemma 3's angles are of single precision there, which moves logits by up to 6e-5: here they are of double."""
    theirs = make_whole(name, tmp_path / "c")
    if name == "gemma3":
        theirs.model.language_model.rotary_emb.forward = partial(in_double, theirs.config.text_config.rope_parameters)
    encoder, backbone = our_models(tmp_path / "c")
    sample = sample_of(name, encoder.config, 1024)
    assert sample.ids.shape == (1, 1024)
    with torch.no_grad():
        expected, _ = their_loss(name, theirs, sample, encoder.config)
        made, _ = our_loss(encoder, backbone, sample)
    assert_close(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LONG)
def test_a_whole_model_comes_back(name: str, tmp_path: Path) -> None:
    """Under the names of its folder; what was not trained is the same to the bit, both frames of patches too."""
    theirs = make_whole(name, tmp_path / "c")
    for file in ("tokenizer.json", "preprocessor_config.json", "chat_template.jinja"):
        (tmp_path / "c" / file).write_text("{}")
    encoder, backbone = our_models(tmp_path / "c")
    with torch.no_grad():
        backbone.norm.weight += 0.25
    parts = [TrainedPart(m.config, {k: v.clone() for k, v in m.state_dict().items()}) for m in (encoder, backbone)]
    assert export_whole(tmp_path / "back", tmp_path / "c", parts) == []
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("c", "back"))
    assert set(after) == set(before)
    changed = [key for key, tensor in before.items() if not torch.equal(tensor, after[key])]
    assert [key.rpartition("model.")[2] for key in changed] in (["norm.weight"], ["language_model.norm.weight"])
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    for file in ("tokenizer.json", "preprocessor_config.json", "chat_template.jinja"):
        (tmp_path / "back" / file).unlink()
    again, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    sample = sample_of(name, encoder.config)
    with torch.no_grad():
        expected, _ = their_loss(name, again.eval(), sample, encoder.config)
        made, _ = our_loss(encoder, backbone, sample)
    assert type(again) is type(theirs)
    assert_close(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [-1, -2, -3])
def test_features_are_those_of_the_chosen_layer(layer: int, tmp_path: Path) -> None:
    """In float64, by formulas; layers behind the chosen one are not read."""
    make_whole("llava", tmp_path / "c", torch.float64)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "c" / "preprocessor_config.json").write_text(json.dumps(half))
    path = tmp_path / "c" / "config.json"
    fields, found = json.loads(path.read_text()), {}
    for chosen in (-1, layer):
        path.write_text(json.dumps(fields | {"vision_feature_layer": chosen}))
        found[chosen] = load_pretrained(tmp_path / "c", kind=EncoderConfig)
    whole, config = found[-1], found[layer].config
    assert isinstance(config, EncoderConfig)
    encoder = ImageEncoder(config).double()
    assert load_into(encoder, found[layer].state) == []
    images = pictures([(6, 6), (2, 4)], config.patch)
    with torch.no_grad():
        made = encoder.features(*packed(images, config.patch, 1))
    expected = [encoder_hidden(whole.config, whole.state, image)[layer].flatten(0, 1) for image in images]
    assert_close(made, torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_weights_in_bfloat16_and_in_several_files(tmp_path: Path) -> None:
    theirs = make_whole("qwen2-vl", tmp_path / "c", torch.bfloat16)
    theirs.save_pretrained(tmp_path / "s", max_shard_size="60KB")
    encoder, backbone = our_models(tmp_path / "s")
    parts = [TrainedPart(m.config, m.state_dict()) for m in (encoder, backbone)]
    export_whole(tmp_path / "back", tmp_path / "s", parts, torch.float32)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert (
        index["weight_map"] == json.loads((tmp_path / "s" / "model.safetensors.index.json").read_text())["weight_map"]
    )
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor.float()), key


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_the_flat_configuration_of_released_folders(name: str, tmp_path: Path) -> None:
    """Fields of the text on top, `rope_scaling` of type mrope, `in_chans`: the export has the same, and the logits."""
    theirs = make_whole(name, tmp_path / "c")
    nested = our_models(tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config["vision_config"]["in_chans"] = config["vision_config"].pop("in_channels")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    kept = {key: value for key, value in text.items() if key not in ("model_type", "layer_types")}
    (tmp_path / "c" / "config.json").write_text(json.dumps({**kept, **config}))
    encoder, backbone = our_models(tmp_path / "c")
    assert (encoder.config, backbone.config) == tuple(module.config for module in nested)
    parts = [TrainedPart(module.config, module.state_dict()) for module in (encoder, backbone)]
    assert export_whole(tmp_path / "back", tmp_path / "c", parts) == []
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {**kept, **config}
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("c", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "back", attn_implementation="eager")
    sample = sample_of(name, encoder.config)
    with torch.no_grad():
        expected, _ = their_loss(name, theirs, sample, encoder.config)
        found, _ = their_loss(name, again.eval(), sample, encoder.config)
        made, _ = our_loss(encoder, backbone, sample)
    assert torch.equal(found, expected)
    assert_close(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llava", {"vision_feature_layer": [-2, -1]}, r"vision_feature_layer is \[-2, -1\]; one layer, from -3 to -1"),
        ("llava", {"vision_feature_select_strategy": "full"}, "default is required: rows of all patches alone"),
        ("llava", {"multimodal_projector_bias": False}, "multimodal_projector_bias is False; True is required"),
        ("llava", {"model_type": "llava_next"}, "cannot be trained here: it scales the rows of tiles to no limit"),
        ("llava", {"model_type": "qwen3_5"}, "cannot be trained here: it has linear attention"),
        ("llava", {"model_type": "qwen3_vl_moe"}, "cannot be trained here: it routes tokens to experts"),
        ("llava", {"model_type": "internvl_chat"}, "no code of a checkpoint is run"),
        (
            "llava",
            {"text_config": {"model_type": "opt"}},
            "'opt'; one of llama, qwen2, qwen3, mistral, phi3",
        ),
        ("gemma3", {"mm_tokens_per_image": 8}, "mm_tokens_per_image is 8; the square of a divisor of 6"),
        ("qwen2-vl", {"quantization_config": {"bits": 4}}, "quantized weights cannot be trained"),
    ],
)
def test_what_our_models_cannot_be(name: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    make_whole(name, tmp_path / "c")
    path = tmp_path / "c" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(PretrainedError, match=message):
        load_pretrained(tmp_path / "c")


def test_what_is_refused_by_name_is_a_family_of_transformers_or_code() -> None:
    """A name that nobody has would refuse nothing."""
    remote = {name for name, reason in REFUSED.items() if "code of a checkpoint" in reason}
    assert set(REFUSED) - remote <= set(CONFIG_MAPPING)
    assert not set(REFUSED) & {*FAMILIES, *WHOLE_MODELS}
    for name, reason in REFUSED.items():
        with pytest.raises(PretrainedError, match=re.escape(f"'{name}'; it cannot be trained here: {reason}")):
            families_of(Fields({"model_type": name}, "config.json"))
    coded = {"model_type": "new_vl", "auto_map": {"AutoModel": "modeling_new.NewVl"}}
    with pytest.raises(PretrainedError, match="'new_vl'; it cannot be trained here: its model is code in the checkpoi"):
        families_of(Fields(coded, "config.json"))


def test_exports_that_do_not_belong_to_their_base(tmp_path: Path) -> None:
    make_whole("qwen2-vl", tmp_path / "c")
    encoder, _ = our_models(tmp_path / "c")
    part = TrainedPart(encoder.config, encoder.state_dict())
    with pytest.raises(PretrainedError, match=r"has mlp_width 72, not 64 as .*; give the folder that it began as"):
        export_whole(tmp_path / "back", tmp_path / "c", [TrainedPart(differing(encoder.config), part.state)])
    without_merger = {name: tensor for name, tensor in part.state.items() if not name.startswith("merger.")}
    with pytest.raises(PretrainedError, match=r"there is nothing for merger\.up\.weight"):
        export_whole(tmp_path / "back", tmp_path / "c", [TrainedPart(encoder.config, without_merger)])
    (tmp_path / "back").mkdir()
    with pytest.raises(PretrainedError, match="is there already"):
        export_whole(tmp_path / "back", tmp_path / "c", [part])


@pytest.mark.parametrize("name", ["llava", "qwen3-vl, tied"])
def test_a_model_that_has_learned_further_tokens(name: str, tmp_path: Path) -> None:
    """Embedding and head have rows for them, and the configuration says so wherever it says how many there are."""
    make_whole(name, tmp_path / "c")
    path = tmp_path / "c" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": VOCAB}))
    encoder, backbone = our_models(tmp_path / "c")
    state = {key: value.clone() for key, value in backbone.state_dict().items()}
    for key in {"embed.weight", "head.weight"} & state.keys():
        state[key] = torch.cat([state[key], torch.full((3, 32), 0.5)])
    more = replace(backbone.config, vocab_size=VOCAB + 3)
    parts = [TrainedPart(encoder.config, encoder.state_dict()), TrainedPart(more, state)]
    base, grown = tmp_path / "c", tmp_path / "tokens"
    grown.mkdir()
    for folder, files in (
        (base, ("tokenizer.json", "vocab.json", "chat_template.jinja")),
        (grown, ("tokenizer.json",)),
    ):
        for file in files:
            (folder / file).write_text(f"{file} of {folder.name}")
    with pytest.raises(PretrainedError, match=f"knows {VOCAB + 3} tokens, and .* knows {VOCAB}; give --tokenizer"):
        export_whole(tmp_path / "back", base, parts)
    with pytest.raises(PretrainedError, match=r"has no tokenizer\.json, tokenizer\.model or NAME\.tiktoken; give"):
        export_whole(tmp_path / "back", base, parts, tokenizer=tmp_path)
    assert export_whole(tmp_path / "bytes", base, parts, built_in=True) == []
    alone = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "bytes").iterdir()} == alone, "the base's tokenizer is another one"
    assert export_whole(tmp_path / "back", base, parts, tokenizer=grown) == []
    found = {name: (tmp_path / "back" / name).read_text() for name in ("tokenizer.json", "chat_template.jinja")}
    assert found == {"tokenizer.json": "tokenizer.json of tokens", "chat_template.jinja": "chat_template.jinja of c"}
    assert not (tmp_path / "back" / "vocab.json").exists(), "of the tokens that were known before"
    (tmp_path / "back" / "tokenizer.json").unlink()
    (tmp_path / "back" / "chat_template.jinja").unlink()
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    assert torch.equal(again.get_input_embeddings().weight, state["embed.weight"])
    assert torch.equal(again.get_output_embeddings().weight, state.get("head.weight", state["embed.weight"]))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["vocab_size"] == config["text_config"]["vocab_size"] == VOCAB + 3
    fewer = TrainedPart(replace(more, vocab_size=VOCAB - 1), state)
    with pytest.raises(PretrainedError, match=f"has vocab_size {VOCAB - 1}, not {VOCAB} as"):
        export_whole(tmp_path / "other", tmp_path / "c", [fewer])


def test_a_tied_head_that_is_stored_too_is_trained(tmp_path: Path) -> None:
    """Otherwise transformers finds two different tensors, and takes the old head. Integers come along."""
    make_whole("qwen3-vl, tied", tmp_path / "c")
    path = tmp_path / "c" / "model.safetensors"
    tensors = load_file(path)
    more = {
        "lm_head.weight": tensors["model.language_model.embed_tokens.weight"].clone(),
        "model.language_model.rotary_emb.inv_freq": torch.arange(4),
    }
    save_file(tensors | more, path, metadata={"format": "pt"})
    encoder, backbone = our_models(tmp_path / "c")
    with torch.no_grad():
        backbone.embed.weight += 0.25
    export_whole(
        tmp_path / "back", tmp_path / "c", [TrainedPart(m.config, m.state_dict()) for m in (encoder, backbone)]
    )
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    assert torch.equal(again.lm_head.weight, backbone.embed.weight)
    assert torch.equal(again.model.language_model.embed_tokens.weight, backbone.embed.weight)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(found["model.language_model.rotary_emb.inv_freq"], torch.arange(4))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_fields_that_are_not_given_have_the_defaults_of_their_family(name: str) -> None:
    theirs = transformers.AutoConfig.for_model(name).text_config
    head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    rope = {"type": "mrope", "mrope_section": [head // 8, head // 8, head // 4]}
    whole = Fields({"model_type": name, "text_config": {"rope_scaling": rope}}, "config.json")
    ours = families_of(whole)[1].read(whole.within("text_config"), whole)
    assert ours.rotary_base == theirs.rope_parameters["rope_theta"]
    assert (ours.heads, ours.groups, ours.head_size) == (theirs.num_attention_heads, theirs.num_key_value_heads, head)
    assert (ours.norm_eps, ours.positions) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (ours.width, ours.layers, ours.vocab_size) == (
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.vocab_size,
    )
    assert ours.mlp_width == theirs.intermediate_size


@pytest.mark.parametrize(
    "unknown",
    ["vision_tower.vision_model.encoder.layers.0.extra.weight", "image_newline", "model.vision_tower_2.weight"],
)
def test_tensors_that_no_part_has_are_refused(unknown: str, tmp_path: Path) -> None:
    """Of the last layer, which is not read, any may be there."""
    make_whole("llava", tmp_path / "c")
    path = tmp_path / "c" / "model.safetensors"
    tensors = load_file(path)
    fine = {"vision_tower.vision_model.encoder.layers.2.extra.weight": torch.zeros(2)}
    save_file(tensors | fine, path, metadata={"format": "pt"})
    load_pretrained(tmp_path / "c")
    save_file(tensors | fine | {unknown: torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(PretrainedError, match=f"1 tensors that no .*, such as .*{unknown}: its architecture"):
        load_pretrained(tmp_path / "c")


def test_processors_of_a_whole_model_get_the_bounds_of_the_job(tmp_path: Path) -> None:
    make_whole("qwen2-vl", tmp_path / "c")
    theirs = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136}
    (tmp_path / "c" / "preprocessor_config.json").write_text(json.dumps(theirs))
    (tmp_path / "c" / "processor_config.json").write_text(json.dumps({"image_processor": theirs, "kept": 1}))
    sizing = Sizing.model_validate({"rule": "qwen", "min_pixels": 784, "max_pixels": 7840, "resampling": "bicubic"})
    part = load_pretrained(tmp_path / "c", kind=EncoderConfig)
    parts = [TrainedPart(part.config, part.state)]
    export_whole(tmp_path / "back", tmp_path / "c", parts, sizing=sizing)
    size = {"shortest_edge": 784, "longest_edge": 7840}
    written = {**theirs, "min_pixels": 784, "size": size, "resample": 3}
    first, second = (
        json.loads((tmp_path / "back" / f"{n}_config.json").read_text()) for n in ("preprocessor", "processor")
    )
    assert (first, second) == (written, {"image_processor": written, "kept": 1})
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back", backend="pil")
    assert {name: processor.size[name] for name in size} == size
    square = Sizing.model_validate({"rule": "square", "side": 56})
    for number, other in enumerate((None, square)):
        export_whole(tmp_path / str(number), tmp_path / "c", parts, sizing=other)
        assert json.loads((tmp_path / str(number) / "preprocessor_config.json").read_text()) == theirs


def test_pinpoints_of_a_job_are_in_the_configuration_and_the_processor(tmp_path: Path) -> None:
    make_whole("onevision", tmp_path / "c")
    theirs = {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 24, "width": 24}}
    whole = {"image_processor": theirs | {"image_grid_pinpoints": [[24, 24]]}, "vision_aspect_ratio": "anyres_max_9"}
    (tmp_path / "c" / "processor_config.json").write_text(json.dumps(whole))
    part = load_pretrained(tmp_path / "c", kind=EncoderConfig)
    parts = [TrainedPart(part.config, part.state)]
    export_whole(tmp_path / "back", tmp_path / "c", parts, sizing=ONEVISION_SIZING)
    pinpoints = [[rows * 24, columns * 24] for rows, columns in ONEVISION_GRIDS]
    config, processor = (
        json.loads((tmp_path / "back" / f"{n}.json").read_text()) for n in ("config", "processor_config")
    )
    assert config["image_grid_pinpoints"] == processor["image_processor"]["image_grid_pinpoints"] == pinpoints
    assert config["vision_aspect_ratio"] == processor["vision_aspect_ratio"] == "anyres_max_2"
    before = json.loads((tmp_path / "c" / "config.json").read_text())
    other = ONEVISION_SIZING.model_copy(update={"side": 48})
    export_whole(tmp_path / "other", tmp_path / "c", parts, sizing=other)
    after, processor = (
        json.loads((tmp_path / "other" / f"{n}.json").read_text()) for n in ("config", "processor_config")
    )
    assert after["image_grid_pinpoints"] == before["image_grid_pinpoints"]
    assert processor == whole, "as before, of the processor's side"


def test_pixels_are_normalised_as_either_processor_says(tmp_path: Path) -> None:
    make_whole("llava", tmp_path / "c")
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    before = load_pretrained(tmp_path / "c").config
    (tmp_path / "c" / "processor_config.json").write_text(json.dumps({"image_processor": half}))
    after = load_pretrained(tmp_path / "c").config
    assert isinstance(before, EncoderConfig)
    assert isinstance(after, EncoderConfig)
    assert before.pixels != after.pixels
    assert PIXELS[after.pixels] == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
