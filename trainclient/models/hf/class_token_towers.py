"""Vision towers with a class token and scaled layers: InternVL's."""

from typing import Any

from torch import Tensor

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.mapping import Entry, linear, norm, vector
from trainclient.models.hf.towers import ACTIVATIONS, pixels_first, side


def read_internvit(fields: Fields, **changes: Any) -> EncoderConfig:
    """Sizes of InternVL's tower, with those that the model around it changes."""
    fields.require("num_channels", 3, "images are RGB")
    fields.require("norm_type", "layer_norm", "our towers with a class token have LayerNorm")
    fields.require("use_qk_norm", False, "our attention has no norm over all heads")
    fields.require("use_mean_pooling", True, "no norm stands behind the last block")
    fields.require("use_absolute_position_embeddings", True, "our tower's positions are learned")
    for name in ("attention_dropout", "projection_dropout", "hidden_dropout_prob"):
        fields.require(name, 0, "our tower drops nothing out")
    patch = side(fields, "patch_size", 14)
    return EncoderConfig(
        layers=fields.integer("num_hidden_layers", 24, MAX_LAYERS),
        width=fields.integer("hidden_size", 1024),
        heads=fields.integer("num_attention_heads", 16),
        mlp_width=fields.integer("intermediate_size", 4096),
        patch=patch,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        pixels="imagenet",
        position_grid=side(fields, "image_size", 448) // patch,
        class_token=True,
        class_norm=False,
        query_bias=fields.flag("attention_bias", default=False),
        layer_scale=True,
        **changes,
    )


def token_entries(config: EncoderConfig) -> list[Entry]:
    """Class token, positions and the embedding of patches."""
    width, positions = config.width, config.position_grid**2 + 1
    shape = (1, positions, width)
    return [
        Entry({"class_embed": width}, "embeddings.cls_token", (1, 1, width), _flat, lambda t: t.view(1, 1, -1)),
        Entry(
            {"position_embed.weight": positions},
            "embeddings.position_embeddings",
            shape,
            lambda t: t.reshape(shape[1:]),
            lambda t: t.view(shape),
        ),
        pixels_first(config, "embeddings.patch_embeddings.projection.weight"),
        vector("patch_embed.bias", "embeddings.patch_embeddings.projection.bias", width),
    ]


def internvit_entries(config: EncoderConfig) -> list[Entry]:
    """All tensors of InternVL's tower."""
    width, bias = config.width, config.query_bias
    found = token_entries(config)
    for number in range(config.layers):
        ours, theirs = f"layers.{number}", f"encoder.layer.{number}"
        found += [
            *norm(f"{ours}.attention_norm", f"{theirs}.layernorm_before", width),
            *linear(f"{ours}.attention.query", f"{theirs}.attention.q_proj", width, width, bias=bias),
            *linear(f"{ours}.attention.key", f"{theirs}.attention.k_proj", width, width, bias=bias),
            *linear(f"{ours}.attention.value", f"{theirs}.attention.v_proj", width, width, bias=bias),
            *linear(f"{ours}.attention.output", f"{theirs}.attention.projection_layer", width, width, bias=True),
            vector(f"{ours}.attention_scale", f"{theirs}.lambda_1", width),
            *norm(f"{ours}.mlp_norm", f"{theirs}.layernorm_after", width),
            *linear(f"{ours}.mlp.up", f"{theirs}.mlp.fc1", config.mlp_width, width, bias=True),
            *linear(f"{ours}.mlp.down", f"{theirs}.mlp.fc2", width, config.mlp_width, bias=True),
            vector(f"{ours}.mlp_scale", f"{theirs}.lambda_2", width),
        ]
    return found


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)
