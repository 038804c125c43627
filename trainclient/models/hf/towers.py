"""Vision towers: SigLIP, CLIP, and that of Qwen2-VL.

Theirs see pixels as (channel, row, column) of a patch and ours as (row, column, channel). Their last norm is our
merger's. Qwen2-VL's comes with its merger; the other towers have none, so that `merge` and `output_dim` are free to
choose, and the merger begins untrained.
"""

from typing import Any, Final

import torch
from torch import Tensor

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.mapping import Entry, Family, linear, norm, stacked, table, vector

ACTIVATIONS: Final = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
"""What our models call the activations of theirs."""
_NAMES: Final = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
FRAMES: Final = 2
"""Frames of a patch of Qwen2-VL, which sees a still image twice."""


def _side(fields: Fields, name: str, default: int) -> int:
    """A size that may be given as [n, n]."""
    value = fields.data.get(name)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        return Fields({name: value[0]}, "config.json").integer(name, most=4096)
    return fields.integer(name, default, 4096)


def _read_square(fields: Fields, *, class_token: bool, patch: int, act: str, eps: float, pixels: str) -> EncoderConfig:
    fields.require("num_channels", 3, "images are RGB")
    fields.require("attention_dropout", 0, "our attention drops nothing out")
    width, heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    if width % heads:
        raise fields.refusal("num_attention_heads", f"a divisor of hidden_size, {width}, is required")
    patch, image = _side(fields, "patch_size", patch), _side(fields, "image_size", 224)
    if image < patch:
        raise fields.refusal("image_size", f"at least patch_size, {patch}, is required")
    return EncoderConfig(
        layers=fields.integer("num_hidden_layers", 12, MAX_LAYERS),
        width=width,
        heads=heads,
        mlp_width=fields.integer("intermediate_size", 3072),
        patch=patch,
        merge=1,
        output_dim=width,
        norm_eps=fields.number("layer_norm_eps", eps),
        activation=fields.choice("hidden_act", ACTIVATIONS, act),
        patch_bias=not class_token,
        pixels=pixels,
        position_grid=image // patch,
        class_token=class_token,
    )


def _read_clip(fields: Fields) -> EncoderConfig:
    return _read_square(fields, class_token=True, patch=32, act="quick_gelu", eps=1e-5, pixels="clip")


def _read_siglip(fields: Fields) -> EncoderConfig:
    return _read_square(fields, class_token=False, patch=16, act="gelu_pytorch_tanh", eps=1e-6, pixels="half")


def _read_qwen2_vl(fields: Fields) -> EncoderConfig:
    for name in ("in_channels", "in_chans"):
        fields.require(name, 3, "images are RGB")
    fields.require("temporal_patch_size", FRAMES, "a still image is seen twice")
    rope = fields.within("rope_parameters")
    rope.require("rope_type", "axial", "our positions are rows and columns")
    rope.require("rope_theta", 10_000, "our encoder's rotary base")
    width, heads = fields.integer("embed_dim", 1280), fields.integer("num_heads", 16)
    if width % heads or width // heads % 4:
        raise fields.refusal("num_heads", f"heads of embed_dim, {width}, in a multiple of 4 are required")
    return EncoderConfig(
        layers=fields.integer("depth", 32, MAX_LAYERS),
        width=width,
        heads=heads,
        mlp_width=int(width * fields.number("mlp_ratio", 4)),
        patch=_side(fields, "patch_size", 14),
        merge=fields.integer("spatial_merge_size", 2, 64),
        output_dim=fields.integer("hidden_size", 3584),
        activation=fields.choice("hidden_act", ACTIVATIONS, "quick_gelu"),
        patch_bias=False,
        pixels="clip",
    )


def _require(config: EncoderConfig, family: str, **required: Any) -> None:
    for name, value in required.items():
        if getattr(config, name) != value:
            raise PretrainedError(
                f"transformers has no model like this encoder: {name} is {getattr(config, name)!r}; {family}, the next "
                f"to it, has {value!r}. An encoder that began as such weights can be exported"
            )


def _write_square(config: EncoderConfig) -> dict[str, Any]:
    return {
        "hidden_act": _NAMES[config.activation],
        "hidden_size": config.width,
        "image_size": config.position_grid * config.patch,
        "intermediate_size": config.mlp_width,
        "layer_norm_eps": config.norm_eps,
        "num_attention_heads": config.heads,
        "num_channels": 3,
        "num_hidden_layers": config.layers,
        "patch_size": config.patch,
    }


def _write_clip(config: EncoderConfig) -> dict[str, Any]:
    _require(config, "clip", patch_bias=False)
    return _write_square(config)


def _write_siglip(config: EncoderConfig) -> dict[str, Any]:
    _require(config, "siglip", patch_bias=True)
    return {**_write_square(config), "vision_use_head": False}


def _write_qwen2_vl(config: EncoderConfig) -> dict[str, Any]:
    _require(config, "qwen2_vl", patch_bias=False, norm_eps=1e-6)
    if config.mlp_width % config.width:
        raise PretrainedError(f"mlp_width is {config.mlp_width}; qwen2_vl has a multiple of the width, {config.width}")
    return {
        "depth": config.layers,
        "embed_dim": config.width,
        "hidden_act": _NAMES[config.activation],
        "hidden_size": config.output_dim,
        "in_channels": 3,
        "mlp_ratio": config.mlp_width // config.width,
        "num_heads": config.heads,
        "patch_size": config.patch,
        "spatial_merge_size": config.merge,
        "temporal_patch_size": FRAMES,
    }


def _patches(config: EncoderConfig, name: str, frames: int) -> Entry:
    """The convolution that embeds patches; `frames` of them in one, or 0 for one of two dimensions.

    A still image meets the sum over the frames. It is written back in equal parts: what only videos would see of it is
    not kept.
    """
    width, patch = config.width, config.patch
    shape = (width, 3, *([frames] if frames else []), patch, patch)

    def read(weight: Tensor) -> Tensor:
        flat = weight.sum(2) if frames else weight
        return flat.permute(0, 2, 3, 1).reshape(width, -1)

    def write(weight: Tensor) -> Tensor:
        square = weight.view(width, patch, patch, 3).permute(0, 3, 1, 2)
        return torch.stack([square / frames] * frames, dim=2) if frames else square

    return Entry({"patch_embed.weight": width}, name, shape, read, write)


def _square_entries(config: EncoderConfig) -> list[Entry]:
    width = config.width
    found = [_patches(config, "embeddings.patch_embedding.weight", 0)]
    if config.patch_bias:
        found.append(vector("patch_embed.bias", "embeddings.patch_embedding.bias", width))
    if config.class_token:
        found.append(vector("class_embed", "embeddings.class_embedding", width))
        found += norm("input_norm", "pre_layrnorm", width)
    positions = config.position_grid**2 + config.class_token
    found.append(table("position_embed.weight", "embeddings.position_embedding.weight", positions, width))
    for number in range(config.layers):
        ours, theirs = f"layers.{number}", f"encoder.layers.{number}"
        found += [
            *norm(f"{ours}.attention_norm", f"{theirs}.layer_norm1", width),
            *linear(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj", width, width, bias=True),
            *linear(f"{ours}.attention.key", f"{theirs}.self_attn.k_proj", width, width, bias=True),
            *linear(f"{ours}.attention.value", f"{theirs}.self_attn.v_proj", width, width, bias=True),
            *linear(f"{ours}.attention.output", f"{theirs}.self_attn.out_proj", width, width, bias=True),
            *norm(f"{ours}.mlp_norm", f"{theirs}.layer_norm2", width),
            *linear(f"{ours}.mlp.up", f"{theirs}.mlp.fc1", config.mlp_width, width, bias=True),
            *linear(f"{ours}.mlp.down", f"{theirs}.mlp.fc2", width, config.mlp_width, bias=True),
        ]
    return [*found, *norm("merger_norm", "post_layernorm", width)]


def _qwen2_vl_entries(config: EncoderConfig) -> list[Entry]:
    width, merged = config.width, config.width * config.merge**2
    found = [_patches(config, "patch_embed.proj.weight", FRAMES)]
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


_IN_TOWER = ("vision_model.", "")
_IGNORED = r"embeddings\.position_ids|head\..*"


def _pixels(config: EncoderConfig) -> str:
    return config.pixels


def _clip_processor(config: EncoderConfig, max_patches: int | None) -> dict[str, Any]:
    del max_patches
    side = config.position_grid * config.patch
    crop = {"do_center_crop": True, "crop_size": {"height": side, "width": side}}
    return {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}, **crop}


def _siglip_processor(config: EncoderConfig, max_patches: int | None) -> dict[str, Any]:
    del max_patches
    side = config.position_grid * config.patch
    return {"image_processor_type": "SiglipImageProcessor", "size": {"height": side, "width": side}}


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


CLIP = Family(
    "clip_vision_model",
    "CLIPVisionModel",
    EncoderConfig,
    _read_clip,
    _write_clip,
    _square_entries,
    _IN_TOWER,
    _IGNORED,
    suits=lambda config: config.class_token,
    pixels=_pixels,
    processor=_clip_processor,
)
SIGLIP = Family(
    "siglip_vision_model",
    "SiglipVisionModel",
    EncoderConfig,
    _read_siglip,
    _write_siglip,
    _square_entries,
    _IN_TOWER,
    _IGNORED,
    suits=lambda config: not config.class_token and config.position_grid > 0,
    pixels=_pixels,
    processor=_siglip_processor,
)
QWEN2_VL = Family(
    "qwen2_vl_vision",
    "Qwen2VisionTransformerPretrainedModel",
    EncoderConfig,
    _read_qwen2_vl,
    _write_qwen2_vl,
    _qwen2_vl_entries,
    ("", "visual.", "model.visual."),
    r"rotary_pos_emb\.inv_freq",
    suits=lambda config: not config.class_token and not config.position_grid,
    pixels=_pixels,
    processor=_qwen2_vl_processor,
)
