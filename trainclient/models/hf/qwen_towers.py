"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which come with their mergers."""

from collections.abc import Mapping
from typing import Any, Final

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.mapping import PLAIN, Alone, Entry, Family, linear, norm, stacked, table, vector
from trainclient.models.hf.towers import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    pixels_first,
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


def _sizes(fields: Fields, *, width: tuple[str, int], layers: int, patch: int, output: str) -> dict[str, Any]:
    """The sizes that all three name, or nearly so.

    Args:
        fields: of the tower.
        width: the name of the field with the width, and its default.
        layers: default of `depth`.
        patch: default of `patch_size`.
        output: the name of the field with the width behind the merger.
    """
    _require_frames(fields)
    named, default = width
    wide, heads = fields.integer(named, default), fields.integer("num_heads", 16)
    if wide % heads or wide // heads % 4:
        raise fields.refusal("num_heads", f"heads of {named}, {wide}, in a multiple of 4 are required")
    return {
        "layers": fields.integer("depth", layers, MAX_LAYERS),
        "width": wide,
        "heads": heads,
        "patch": side(fields, "patch_size", patch),
        "merge": fields.integer("spatial_merge_size", 2, 64),
        "output_dim": fields.integer(output, 3584),
        "second_frame": True,
    }


def _layers_named(fields: Fields, name: str, default: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Numbers of layers, in order."""
    found = fields.value(name, list(default))
    if not isinstance(found, list) or any(type(n) is not int or not 0 <= n < layers for n in found):
        raise fields.refusal(name, f"numbers from 0 to {layers - 1} are required")
    if sorted(set(found)) != found:
        raise fields.refusal(name, "numbers that rise are required")
    return tuple(found)


def _read_qwen2_vl(fields: Fields, whole: Fields) -> EncoderConfig:
    del whole
    sizes = _sizes(fields, width=("embed_dim", 1280), layers=32, patch=14, output="hidden_size")
    return EncoderConfig(
        **sizes,
        mlp_width=int(sizes["width"] * fields.number("mlp_ratio", 4)),
        activation=fields.choice("hidden_act", ACTIVATIONS, "quick_gelu"),
        patch_bias=False,
        pixels="clip",
    )


def _read_qwen2_5_vl(fields: Fields, whole: Fields) -> EncoderConfig:
    del whole
    sizes = _sizes(fields, width=("hidden_size", 3584), layers=32, patch=14, output="out_hidden_size")
    block, window = sizes["merge"] * sizes["patch"], fields.integer("window_size", 112)
    if window < block:
        raise fields.refusal("window_size", f"at least one block, {block}, is required")
    return EncoderConfig(
        **sizes,
        mlp_width=fields.integer("intermediate_size", 3420),
        activation=fields.choice("hidden_act", {"silu": "silu"}, "silu"),
        patch_bias=False,
        pixels="clip",
        rms_norms=True,
        gated=True,
        window=window // block,
        global_layers=_layers_named(fields, "fullatt_block_indexes", (7, 15, 23, 31), sizes["layers"]),
    )


def _read_qwen3_vl(fields: Fields, whole: Fields) -> EncoderConfig:
    del whole
    sizes = _sizes(fields, width=("hidden_size", 1152), layers=27, patch=16, output="out_hidden_size")
    return EncoderConfig(
        **sizes,
        mlp_width=fields.integer("intermediate_size", 4304),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        pixels="half",
        position_grid=fields.root("num_position_embeddings", 2304),
        position_scaling="bilinear",
        rotary=True,
        projector="merger",
        deepstack=_layers_named(fields, "deepstack_visual_indexes", (8, 16, 24), sizes["layers"]),
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


def _norm(config: EncoderConfig, ours: str, theirs: str, width: int) -> list[Entry]:
    if config.rms_norms:
        return [vector(f"{ours}.weight", f"{theirs}.weight", width)]
    return norm(ours, theirs, width)


def _block_entries(config: EncoderConfig, mlp: Mapping[str, str]) -> list[Entry]:
    """The entries of all blocks.

    Args:
        config: of the encoder.
        mlp: what the family calls the layers of our MLPs, in order.
    """
    width, found = config.width, list[Entry]()
    for number in range(config.layers):
        ours, theirs = f"layers.{number}", f"blocks.{number}"
        projections = {f"{ours}.attention.{name}": width for name in ("query", "key", "value")}
        found += [
            *_norm(config, f"{ours}.attention_norm", f"{theirs}.norm1", width),
            *stacked(projections, f"{theirs}.attn.qkv", width, bias=True),
            *linear(f"{ours}.attention.output", f"{theirs}.attn.proj", width, width, bias=True),
            *_norm(config, f"{ours}.mlp_norm", f"{theirs}.norm2", width),
        ]
        for name, named in mlp.items():
            rows, columns = (width, config.mlp_width) if name == "down" else (config.mlp_width, width)
            found += linear(f"{ours}.mlp.{name}", f"{theirs}.mlp.{named}", rows, columns, bias=True)
    return found


def _merger_entries(
    config: EncoderConfig, ours: tuple[str, str], theirs: str, names: tuple[str, str, str], width: int
) -> list[Entry]:
    """The entries of one merger.

    Args:
        config: of the encoder.
        ours: the names of its norm, and of what has the two layers behind it.
        theirs: its name in the family.
        names: what the family calls the norm and both layers.
        width: of the norm.
    """
    (norm_name, layers), (normed, up, down) = ours, names
    merged = config.width * config.merge**2
    return [
        *_norm(config, norm_name, f"{theirs}.{normed}", width),
        *linear(f"{layers}.up", f"{theirs}.{up}", merged, merged, bias=True),
        *linear(f"{layers}.down", f"{theirs}.{down}", config.output_dim, merged, bias=True),
    ]


_MERGER: Final = ("merger_norm", "merger")
_MLP_MERGER: Final = ("ln_q", "mlp.0", "mlp.2")
_NAMED_MERGER: Final = ("norm", "linear_fc1", "linear_fc2")


def _qwen2_vl_entries(config: EncoderConfig) -> list[Entry]:
    return [
        pixels_first(config, "patch_embed.proj.weight"),
        *_block_entries(config, {"up": "fc1", "down": "fc2"}),
        *_merger_entries(config, _MERGER, "merger", _MLP_MERGER, config.width),
    ]


def _qwen2_5_vl_entries(config: EncoderConfig) -> list[Entry]:
    return [
        pixels_first(config, "patch_embed.proj.weight"),
        *_block_entries(config, {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
        *_merger_entries(config, _MERGER, "merger", _MLP_MERGER, config.width),
    ]


def _qwen3_vl_entries(config: EncoderConfig) -> list[Entry]:
    found = [
        pixels_first(config, "patch_embed.proj.weight"),
        vector("patch_embed.bias", "patch_embed.proj.bias", config.width),
        table("position_embed.weight", "pos_embed.weight", config.position_grid**2, config.width),
        *_block_entries(config, {"up": "linear_fc1", "down": "linear_fc2"}),
        *_merger_entries(config, _MERGER, "merger", _NAMED_MERGER, config.width),
    ]
    for number in range(len(config.deepstack)):
        ours = f"deepstack.{number}.norm", f"deepstack.{number}.mlp"
        theirs = f"deepstack_merger_list.{number}"
        found += _merger_entries(config, ours, theirs, _NAMED_MERGER, config.width * config.merge**2)
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
)
QWEN2_5_VL: Final = Family(
    "qwen2_5_vl_vision",
    EncoderConfig,
    _read_qwen2_5_vl,
    _qwen2_5_vl_entries,
    _IGNORED,
    _SPELLINGS,
    "vision_config",
)
QWEN3_VL: Final = Family(
    "qwen3_vl_vision",
    EncoderConfig,
    _read_qwen3_vl,
    _qwen3_vl_entries,
    _IGNORED,
    _SPELLINGS,
    "vision_config",
)
