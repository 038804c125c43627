"""Vision towers with a class token and scaled layers: InternVL's, and DINOv2 with and without registers."""

from collections.abc import Callable
from typing import Any, Final

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.mapping import Alone, Entry, Family, linear, norm, reshaped, stacked, vector
from trainclient.models.hf.towers import ACTIVATION_NAMES, ACTIVATIONS, center_crop, pixels_first, require_sizes, side


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
    return [
        reshaped("class_embed", "embeddings.cls_token", (width,), (1, 1, width)),
        reshaped("position_embed.weight", "embeddings.position_embeddings", (positions, width), (1, positions, width)),
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


def _read_dino(fields: Fields, whole: Fields) -> EncoderConfig:
    """Sizes of DINOv2; its MLPs are gated in the largest."""
    del whole
    fields.require("num_channels", 3, "images are RGB")
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "drop_path_rate"):
        fields.require(name, 0, "our tower drops nothing out")
    patch, width = side(fields, "patch_size", 14), fields.integer("hidden_size", 768)
    gated = fields.flag("use_swiglu_ffn", default=False)
    mlp_width = width * fields.integer("mlp_ratio", 4)
    registers = fields.integer("num_register_tokens", 4, 64) if _has_registers(fields) else 0
    return EncoderConfig(
        layers=fields.integer("num_hidden_layers", 12, MAX_LAYERS),
        width=width,
        heads=fields.integer("num_attention_heads", 12),
        mlp_width=(int(mlp_width * 2 / 3) + 7) // 8 * 8 if gated else mlp_width,
        patch=patch,
        merge=1,
        output_dim=width,
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        activation="silu" if gated else fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        pixels="imagenet",
        position_grid=side(fields, "image_size", 224) // patch,
        position_scaling="smooth" if registers else None,
        class_token=True,
        class_norm=False,
        registers=registers,
        query_bias=fields.flag("qkv_bias", default=True),
        layer_scale=True,
        gated=gated,
    )


def _has_registers(fields: Fields) -> bool:
    return fields.data.get("model_type") == "dinov2_with_registers"


def _dino_entries(config: EncoderConfig) -> list[Entry]:
    width, hidden, bias = config.width, config.mlp_width, config.query_bias
    found = token_entries(config)
    if config.registers:
        shape = config.registers, width
        found.append(reshaped("register_embed", "embeddings.register_tokens", shape, (1, *shape)))
    for number in range(config.layers):
        ours, theirs = f"layers.{number}", f"encoder.layer.{number}"
        found += [
            *norm(f"{ours}.attention_norm", f"{theirs}.norm1", width),
            *linear(f"{ours}.attention.query", f"{theirs}.attention.attention.query", width, width, bias=bias),
            *linear(f"{ours}.attention.key", f"{theirs}.attention.attention.key", width, width, bias=bias),
            *linear(f"{ours}.attention.value", f"{theirs}.attention.attention.value", width, width, bias=bias),
            *linear(f"{ours}.attention.output", f"{theirs}.attention.output.dense", width, width, bias=True),
            vector(f"{ours}.attention_scale", f"{theirs}.layer_scale1.lambda1", width),
            *norm(f"{ours}.mlp_norm", f"{theirs}.norm2", width),
            vector(f"{ours}.mlp_scale", f"{theirs}.layer_scale2.lambda1", width),
        ]
        if config.gated:
            halves = {f"{ours}.mlp.gate": hidden, f"{ours}.mlp.up": hidden}
            found += stacked(halves, f"{theirs}.mlp.weights_in", width, bias=True)
            found += linear(f"{ours}.mlp.down", f"{theirs}.mlp.weights_out", width, hidden, bias=True)
        else:
            found += linear(f"{ours}.mlp.up", f"{theirs}.mlp.fc1", hidden, width, bias=True)
            found += linear(f"{ours}.mlp.down", f"{theirs}.mlp.fc2", width, hidden, bias=True)
    return [*found, *norm("merger_norm", "layernorm", width)]


def _write_dino(config: EncoderConfig) -> dict[str, Any]:
    require_sizes(config, "dinov2", patch_bias=True, rms_norms=False)
    ratio = 4 if config.gated else config.mlp_width // config.width
    wanted = (int(ratio * config.width * 2 / 3) + 7) // 8 * 8 if config.gated else ratio * config.width
    require_sizes(config, "dinov2", mlp_width=wanted)
    return {
        "hidden_act": "gelu" if config.gated else ACTIVATION_NAMES[config.activation],
        "hidden_size": config.width,
        "image_size": config.position_grid * config.patch,
        "layer_norm_eps": config.norm_eps,
        "mlp_ratio": ratio,
        "num_attention_heads": config.heads,
        "num_channels": 3,
        "num_hidden_layers": config.layers,
        "patch_size": config.patch,
        "qkv_bias": config.query_bias,
        "use_mask_token": False,
        "use_swiglu_ffn": config.gated,
        **({"num_register_tokens": config.registers} if config.registers else {}),
    }


def _dino(name: str, architecture: str, suits: Callable[[EncoderConfig], bool]) -> Family[EncoderConfig]:
    return Family(
        name,
        EncoderConfig,
        _read_dino,
        _dino_entries,
        r"embeddings\.mask_token",
        alone=Alone(architecture, _write_dino, lambda c: c.layer_scale and c.is_bare and suits(c), _dino_processor),
    )


def _dino_processor(config: EncoderConfig, max_patches: int | None) -> dict[str, Any]:
    del max_patches
    return {"image_processor_type": "BitImageProcessor", "resample": 3, **center_crop(config)}


DINOV2: Final = _dino("dinov2", "Dinov2Model", lambda config: not config.registers)
DINOV2_REGISTERS: Final = _dino(
    "dinov2_with_registers", "Dinov2WithRegistersModel", lambda config: config.registers > 0
)
