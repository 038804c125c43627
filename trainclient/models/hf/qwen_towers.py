"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which come with their mergers."""

from typing import Any, Final

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.mapping import PLAIN, Alone, Entry, Family, linear, norm, stacked, table, vector
from trainclient.models.hf.towers import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    pixels_first,
    pixels_of,
    require_sizes,
    side,
)

FRAMES: Final = 2
"""Frames of a patch, which sees a still image twice."""
_SPELLINGS: Final = (PLAIN, {"": "visual."}, {"": "model.visual."})
_IGNORED: Final = r"rotary_pos_emb\.inv_freq"


def _require_frames(fields: Fields) -> None:
    for name in ("in_channels", "in_chans"):
        fields.require(name, 3, "images are RGB")
    fields.require("temporal_patch_size", FRAMES, "a still image is seen twice")
    rope = fields.within("rope_parameters")
    rope.require("rope_type", "axial", "our positions are rows and columns")
    rope.require("rope_theta", 10_000, "our encoder's rotary base")


def _heads(fields: Fields, name: str, default: int) -> tuple[int, int]:
    """The width, by its name, and the number of heads."""
    width, heads = fields.integer(name, default), fields.integer("num_heads", 16)
    if width % heads or width // heads % 4:
        raise fields.refusal("num_heads", f"heads of {name}, {width}, in a multiple of 4 are required")
    return width, heads


def _layers_named(fields: Fields, name: str, default: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Numbers of layers, in order."""
    found = fields.data.get(name)
    found = list(default) if found is None else found
    if not isinstance(found, list) or any(type(n) is not int or not 0 <= n < layers for n in found):
        raise fields.refusal(name, f"numbers from 0 to {layers - 1} are required")
    if sorted(set(found)) != found:
        raise fields.refusal(name, "numbers that rise are required")
    return tuple(found)


def _read_qwen2_vl(fields: Fields, whole: Fields) -> EncoderConfig:
    del whole
    _require_frames(fields)
    width, heads = fields.integer("embed_dim", 1280), fields.integer("num_heads", 16)
    if width % heads or width // heads % 4:
        raise fields.refusal("num_heads", f"heads of embed_dim, {width}, in a multiple of 4 are required")
    return EncoderConfig(
        layers=fields.integer("depth", 32, MAX_LAYERS),
        width=width,
        heads=heads,
        mlp_width=int(width * fields.number("mlp_ratio", 4)),
        patch=side(fields, "patch_size", 14),
        merge=fields.integer("spatial_merge_size", 2, 64),
        output_dim=fields.integer("hidden_size", 3584),
        activation=fields.choice("hidden_act", ACTIVATIONS, "quick_gelu"),
        patch_bias=False,
        pixels="clip",
        second_frame=True,
    )


def _read_qwen2_5_vl(fields: Fields, whole: Fields) -> EncoderConfig:
    del whole
    _require_frames(fields)
    width, heads = _heads(fields, "hidden_size", 3584)
    layers, patch = fields.integer("depth", 32, MAX_LAYERS), side(fields, "patch_size", 14)
    merge, window = fields.integer("spatial_merge_size", 2, 64), fields.integer("window_size", 112)
    if window < merge * patch:
        raise fields.refusal("window_size", f"at least one block, {merge * patch}, is required")
    return EncoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        mlp_width=fields.integer("intermediate_size", 3420),
        patch=patch,
        merge=merge,
        output_dim=fields.integer("out_hidden_size", 3584),
        activation=fields.choice("hidden_act", {"silu": "silu"}, "silu"),
        patch_bias=False,
        pixels="clip",
        rms_norms=True,
        gated=True,
        window=window // merge // patch,
        global_layers=_layers_named(fields, "fullatt_block_indexes", (7, 15, 23, 31), layers),
        second_frame=True,
    )


def _read_qwen3_vl(fields: Fields, whole: Fields) -> EncoderConfig:
    del whole
    _require_frames(fields)
    width, heads = _heads(fields, "hidden_size", 1152)
    layers, positions = fields.integer("depth", 27, MAX_LAYERS), fields.integer("num_position_embeddings", 2304)
    grid = round(positions**0.5)
    if grid**2 != positions:
        raise fields.refusal("num_position_embeddings", "the square of a number is required")
    return EncoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        mlp_width=fields.integer("intermediate_size", 4304),
        patch=side(fields, "patch_size", 16),
        merge=fields.integer("spatial_merge_size", 2, 64),
        output_dim=fields.integer("out_hidden_size", 3584),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        pixels="half",
        position_grid=grid,
        position_scaling="bilinear",
        rotary=True,
        second_frame=True,
        projector="merger",
        deepstack=_layers_named(fields, "deepstack_visual_indexes", (8, 16, 24), layers),
    )


def _write_qwen2_vl(config: EncoderConfig) -> dict[str, Any]:
    require_sizes(config, "qwen2_vl", patch_bias=False, norm_eps=1e-6, second_frame=True, projector=None)
    if config.mlp_width % config.width:
        raise PretrainedError(f"mlp_width is {config.mlp_width}; qwen2_vl has a multiple of the width, {config.width}")
    return {
        "depth": config.layers,
        "embed_dim": config.width,
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "hidden_size": config.output_dim,
        "in_channels": 3,
        "mlp_ratio": config.mlp_width // config.width,
        "num_heads": config.heads,
        "patch_size": config.patch,
        "spatial_merge_size": config.merge,
        "temporal_patch_size": FRAMES,
    }


def _qwen2_vl_entries(config: EncoderConfig) -> list[Entry]:
    width, merged = config.width, config.width * config.merge**2
    found = [pixels_first(config, "patch_embed.proj.weight")]
    for number in range(config.layers):
        ours, theirs = f"layers.{number}", f"blocks.{number}"
        projections = {f"{ours}.attention.{name}": width for name in ("query", "key", "value")}
        found += [
            *norm(f"{ours}.attention_norm", f"{theirs}.norm1", width),
            *stacked(projections, f"{theirs}.attn.qkv", width, bias=True),
            *linear(f"{ours}.attention.output", f"{theirs}.attn.proj", width, width, bias=True),
            *norm(f"{ours}.mlp_norm", f"{theirs}.norm2", width),
            *linear(f"{ours}.mlp.up", f"{theirs}.mlp.fc1", config.mlp_width, width, bias=True),
            *linear(f"{ours}.mlp.down", f"{theirs}.mlp.fc2", width, config.mlp_width, bias=True),
        ]
    return [
        *found,
        *norm("merger_norm", "merger.ln_q", width),
        *linear("merger.up", "merger.mlp.0", merged, merged, bias=True),
        *linear("merger.down", "merger.mlp.2", config.output_dim, merged, bias=True),
    ]


def _qwen2_5_vl_entries(config: EncoderConfig) -> list[Entry]:
    width, merged = config.width, config.width * config.merge**2
    found = [pixels_first(config, "patch_embed.proj.weight")]
    for number in range(config.layers):
        ours, theirs = f"layers.{number}", f"blocks.{number}"
        projections = {f"{ours}.attention.{name}": width for name in ("query", "key", "value")}
        found += [
            vector(f"{ours}.attention_norm.weight", f"{theirs}.norm1.weight", width),
            *stacked(projections, f"{theirs}.attn.qkv", width, bias=True),
            *linear(f"{ours}.attention.output", f"{theirs}.attn.proj", width, width, bias=True),
            vector(f"{ours}.mlp_norm.weight", f"{theirs}.norm2.weight", width),
            *linear(f"{ours}.mlp.gate", f"{theirs}.mlp.gate_proj", config.mlp_width, width, bias=True),
            *linear(f"{ours}.mlp.up", f"{theirs}.mlp.up_proj", config.mlp_width, width, bias=True),
            *linear(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", width, config.mlp_width, bias=True),
        ]
    return [
        *found,
        vector("merger_norm.weight", "merger.ln_q.weight", width),
        *linear("merger.up", "merger.mlp.0", merged, merged, bias=True),
        *linear("merger.down", "merger.mlp.2", config.output_dim, merged, bias=True),
    ]


def _qwen3_vl_entries(config: EncoderConfig) -> list[Entry]:
    width, merged = config.width, config.width * config.merge**2
    found = [
        pixels_first(config, "patch_embed.proj.weight"),
        vector("patch_embed.bias", "patch_embed.proj.bias", width),
        table("position_embed.weight", "pos_embed.weight", config.position_grid**2, width),
    ]
    for number in range(config.layers):
        ours, theirs = f"layers.{number}", f"blocks.{number}"
        projections = {f"{ours}.attention.{name}": width for name in ("query", "key", "value")}
        found += [
            *norm(f"{ours}.attention_norm", f"{theirs}.norm1", width),
            *stacked(projections, f"{theirs}.attn.qkv", width, bias=True),
            *linear(f"{ours}.attention.output", f"{theirs}.attn.proj", width, width, bias=True),
            *norm(f"{ours}.mlp_norm", f"{theirs}.norm2", width),
            *linear(f"{ours}.mlp.up", f"{theirs}.mlp.linear_fc1", config.mlp_width, width, bias=True),
            *linear(f"{ours}.mlp.down", f"{theirs}.mlp.linear_fc2", width, config.mlp_width, bias=True),
        ]
    mergers = [("merger_norm", "merger", "merger", width)]
    for number in range(len(config.deepstack)):
        ours = f"deepstack.{number}"
        mergers.append((f"{ours}.norm", f"{ours}.mlp", f"deepstack_merger_list.{number}", merged))
    for normed, projected, theirs, norm_width in mergers:
        found += [
            *norm(normed, f"{theirs}.norm", norm_width),
            *linear(f"{projected}.up", f"{theirs}.linear_fc1", merged, merged, bias=True),
            *linear(f"{projected}.down", f"{theirs}.linear_fc2", config.output_dim, merged, bias=True),
        ]
    return found


def _qwen2_vl_processor(config: EncoderConfig, max_patches: int | None) -> dict[str, Any]:
    block = config.patch * config.merge
    most = {"size": {"shortest_edge": block**2, "longest_edge": max_patches * config.patch**2}} if max_patches else {}
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": config.merge,
        "patch_size": config.patch,
        "temporal_patch_size": FRAMES,
        **most,
    }


def _is_qwen2_vl(config: EncoderConfig) -> bool:
    special = config.class_token, config.position_grid, config.projector, config.rms_norms
    return not any(special)


QWEN2_VL: Final = Family(
    "qwen2_vl_vision",
    EncoderConfig,
    _read_qwen2_vl,
    _qwen2_vl_entries,
    _IGNORED,
    _SPELLINGS,
    "vision_config",
    Alone("Qwen2VisionTransformerPretrainedModel", _write_qwen2_vl, _is_qwen2_vl, _qwen2_vl_processor),
    pixels=pixels_of,
)
QWEN2_5_VL: Final = Family(
    "qwen2_5_vl_vision",
    EncoderConfig,
    _read_qwen2_5_vl,
    _qwen2_5_vl_entries,
    _IGNORED,
    _SPELLINGS,
    "vision_config",
    pixels=pixels_of,
)
QWEN3_VL: Final = Family(
    "qwen3_vl_vision",
    EncoderConfig,
    _read_qwen3_vl,
    _qwen3_vl_entries,
    _IGNORED,
    _SPELLINGS,
    "vision_config",
    pixels=pixels_of,
)
