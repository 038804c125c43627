"""Tiny random checkpoints of transformers, and what our models make of the same inputs."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.hf import Pretrained, load_into
from trainclient.models.parameters import initialise
from trainclient.models.patches import PIXELS

VOCAB = 97
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def rotary(**parameters: Any) -> dict[str, Any]:
    """The fields of a configuration for rotary positions, as the release of transformers at hand has them."""
    if int(transformers.__version__.partition(".")[0]) >= 5:
        return {"rope_parameters": parameters}
    base = parameters.pop("rope_theta")
    return {"rope_theta": base, "rope_scaling": parameters}


BACKBONES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama with biases and wide heads": (transformers.LlamaConfig, {"attention_bias": True, "head_dim": 24}),
    "llama 3.1": (transformers.LlamaConfig, {**rotary(**LLAMA_ROPE), "num_key_value_heads": 1}),
    "llama, stretched": (
        transformers.LlamaConfig,
        rotary(rope_type="linear", factor=4.0, rope_theta=10_000.0),
    ),
    "llama, tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {"rms_norm_eps": 1e-6}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "rms_norm_eps": 1e-6}),
    "qwen3, tied": (transformers.Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral with windows": (transformers.MistralConfig, {"sliding_window": 8, "head_dim": 16}),
    "phi3": (transformers.Phi3Config, {"pad_token_id": 0}),
    "phi3 with windows": (transformers.Phi3Config, {"pad_token_id": 0, "sliding_window": 8}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 16}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 6},
    ),
    "qwen2, tied": (transformers.Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}
SQUARE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
}
DINO = {name: value for name, value in SQUARE.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", SQUARE),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", SQUARE),
    "siglip with gelu": ("SiglipVisionConfig", "SiglipVisionModel", {**SQUARE, "hidden_act": "gelu"}),
    "siglip2": (
        "Siglip2VisionConfig",
        "Siglip2VisionModel",
        {**{name: value for name, value in SQUARE.items() if name != "image_size"}, "num_patches": 36},
    ),
    "dinov2": ("Dinov2Config", "Dinov2Model", {**DINO, "use_mask_token": False}),
    "dinov2, gated": ("Dinov2Config", "Dinov2Model", {**DINO, "mlp_ratio": 4, "use_swiglu_ffn": True}),
    "dinov2 with registers": ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", DINO),
    "qwen2-vl": (
        "Qwen2VLVisionConfig",
        "Qwen2VisionTransformerPretrainedModel",
        {"depth": 3, "embed_dim": 32, "hidden_size": 40, "mlp_ratio": 3, "num_heads": 2, "patch_size": 4},
    ),
    "qwen2-vl of patch 8": (
        "Qwen2VLVisionConfig",
        "Qwen2VisionTransformerPretrainedModel",
        {"depth": 1, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 1, "num_heads": 2, "patch_size": 8},
    ),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter away from what it begins as: biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.08)


def causal_config(name: str) -> Any:
    """The configuration of a causal language model of transformers."""
    config_class, changes = BACKBONES[name]
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **changes,
    }
    return config_class(**fields)


def make_backbone(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A causal language model of transformers."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(causal_config(name))
    randomise(model, seed)
    return model.to(dtype).eval()


def class_named(name: str) -> Any:
    """A class of transformers; not all of them are in its first module."""
    if name.startswith("Qwen2V"):
        module = "configuration_qwen2_vl" if name.endswith("Config") else "modeling_qwen2_vl"
        return getattr(importlib.import_module(f"transformers.models.qwen2_vl.{module}"), name)
    return getattr(transformers, name)


def make_tower(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A vision tower of transformers."""
    config_class, model_class, fields = TOWERS[name]
    torch.manual_seed(seed)
    model = class_named(model_class)(class_named(config_class)(**fields))
    randomise(model, seed)
    return model.to(dtype).eval()


def our_backbone(found: Pretrained) -> BackboneStage:
    """Our model with the parameters of a checkpoint, in their type."""
    assert isinstance(found.config, BackboneConfig)
    model = BackboneStage(found.config).to(next(iter(found.state.values())).dtype)
    assert load_into(model, found.state) == []
    return model


def our_encoder(found: Pretrained, merge: int = 2) -> tuple[ImageEncoder, list[str]]:
    """The same of an encoder; also what the checkpoint did not have."""
    config = found.config
    assert isinstance(config, EncoderConfig)
    if config.merge == 1:
        config = replace(config, merge=merge, output_dim=20)
    model = ImageEncoder(config).to(next(iter(found.state.values())).dtype)
    initialise(model, 0, "vit")
    return model, load_into(model, found.state)


def our_batch(ids: Tensor) -> BackboneBatch:
    """Sequences [n, length], packed one after the other."""
    count, length = ids.shape
    none = torch.zeros(0, dtype=torch.int64)
    return BackboneBatch(
        cu_lengths=torch.arange(count + 1) * length,
        position_ids=torch.arange(length).repeat(count),
        token_ids=ids.flatten(),
        embedding_slots=none,
        condition_slots=none,
        labels=None,
    )


@torch.no_grad()
def our_logits(model: BackboneStage, ids: Tensor) -> Tensor:
    """Logits [n, length, vocabulary]."""
    batch = our_batch(ids)
    hidden = model._run_layers(model._embed(batch, None, None), batch)
    logits = torch.nn.functional.linear(model.norm(hidden), model.head_weight)
    return logits.view(*ids.shape, -1)


def pictures(grids: list[tuple[int, int]], patch: int, seed: int = 3) -> list[Tensor]:
    """Random pictures, uint8 [height, width, 3]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows * patch, columns * patch, 3) for rows, columns in grids]
    return [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]


def packed(images: list[Tensor], patch: int, merge: int) -> tuple[Tensor, Tensor, Tensor]:
    """Patches, grid and cu_patches of our encoder: merge-block-major, (y, x, channel) within a patch."""
    rows, grids = [], []
    for image in images:
        height, width = image.shape[0] // patch, image.shape[1] // patch
        cut = image.view(height // merge, merge, patch, width // merge, merge, patch, 3)
        rows.append(cut.permute(0, 3, 1, 4, 2, 5, 6).reshape(height * width, -1))
        grids.append((height, width))
    counts = torch.tensor([len(r) for r in rows])
    return torch.cat(rows), torch.tensor(grids), torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def normalised(image: Tensor, pixels: str, dtype: torch.dtype) -> Tensor:
    """What a processor of transformers makes of a picture: [3, height, width]."""
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in PIXELS[pixels])
    return ((image.to(torch.float64) / 255 - mean) / std).permute(2, 0, 1).to(dtype)


def in_rows(image_rows: Tensor, grid: tuple[int, int], merge: int) -> Tensor:
    """Rows of one image from merge-block-major to row by row."""
    rows, columns = grid
    blocks = image_rows.view(rows // merge, columns // merge, merge, merge, -1)
    return blocks.permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model of transformers."""
    model.save_pretrained(folder, **options)
    return folder
