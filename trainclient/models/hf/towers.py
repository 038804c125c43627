"""Vision towers of square images: SigLIP and CLIP.

Theirs see pixels as (channel, row, column) of a patch and ours as (row, column, channel). Their last norm is our
merger's. They have no merger, so that `merge` and `output_dim` are free to choose, and the merger begins untrained.
"""

from typing import Any, Final

from torch import Tensor

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.mapping import PLAIN, Alone, Entry, Family, linear, norm, table, vector

ACTIVATIONS: Final = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
"""What our models call the activations of theirs."""
ACTIVATION_NAMES: Final = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


def side(fields: Fields, name: str, default: int) -> int:
    """A size that may be given as [n, n]."""
    value = fields.data.get(name)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        return Fields({name: value[0]}, "config.json").integer(name, most=4096)
    return fields.integer(name, default, 4096)


def read_square(
    fields: Fields, *, class_token: bool, patch: int, act: str, eps: float, pixels: str, **changes: Any
) -> EncoderConfig:
    """Sizes of a tower of square images.

    Args:
        fields: of the tower.
        class_token: whether it has one, as CLIP.
        patch: default of `patch_size`.
        act: default of `hidden_act`.
        eps: default of `layer_norm_eps`.
        pixels: how its pixels are normalised.
        changes: sizes that a model around it changes.
    """
    fields.require("num_channels", 3, "images are RGB")
    fields.require("attention_dropout", 0, "our attention drops nothing out")
    width, heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    if width % heads:
        raise fields.refusal("num_attention_heads", f"a divisor of hidden_size, {width}, is required")
    patch, image = side(fields, "patch_size", patch), side(fields, "image_size", 224)
    if image < patch:
        raise fields.refusal("image_size", f"at least patch_size, {patch}, is required")
    found: dict[str, Any] = {
        "layers": fields.integer("num_hidden_layers", 12, MAX_LAYERS),
        "width": width,
        "heads": heads,
        "mlp_width": fields.integer("intermediate_size", 3072),
        "patch": patch,
        "merge": 1,
        "output_dim": width,
        "norm_eps": fields.number("layer_norm_eps", eps),
        "activation": fields.choice("hidden_act", ACTIVATIONS, act),
        "patch_bias": not class_token,
        "pixels": pixels,
        "position_grid": image // patch,
        "class_token": class_token,
    }
    return EncoderConfig(**found | changes)


def read_clip(fields: Fields, whole: Fields, **changes: Any) -> EncoderConfig:
    """Sizes of CLIP's tower, with those that a model around it changes."""
    del whole
    return read_square(fields, class_token=True, patch=32, act="quick_gelu", eps=1e-5, pixels="clip", **changes)


def read_siglip(fields: Fields, whole: Fields, **changes: Any) -> EncoderConfig:
    """Read the sizes of SigLIP's tower."""
    del whole
    known: dict[str, Any] = {"patch": 16, "act": "gelu_pytorch_tanh", "eps": 1e-6, "pixels": "half"}
    return read_square(fields, class_token=False, **known | changes)


def require_sizes(config: EncoderConfig, family: str, **required: Any) -> None:
    """Refuse to export an encoder whose sizes are not those of a family."""
    for name, value in required.items():
        if getattr(config, name) != value:
            raise PretrainedError(
                f"transformers has no model like this encoder: {name} is {getattr(config, name)!r}; {family}, the next "
                f"to it, has {value!r}. An encoder that began as such weights can be exported"
            )


def write_square(config: EncoderConfig) -> dict[str, Any]:
    """The fields that all of them have."""
    return {
        "hidden_act": ACTIVATION_NAMES[config.activation],
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
    require_sizes(config, "clip", patch_bias=False)
    return write_square(config)


def _write_siglip(config: EncoderConfig) -> dict[str, Any]:
    require_sizes(config, "siglip", patch_bias=True)
    return {**write_square(config), "vision_use_head": False}


def pixels_first(config: EncoderConfig, name: str) -> Entry:
    """The convolution that embeds patches, over pixels, or over pixels of frames."""
    width, patch, frames = config.width, config.patch, 1 + config.second_frame
    shape = (width, 3, *([frames] if config.second_frame else []), patch, patch)

    def read(weight: Tensor) -> Tensor:
        return weight.reshape(width, 3, frames, patch, patch).permute(0, 2, 3, 4, 1).reshape(width, -1)

    def write(weight: Tensor) -> Tensor:
        return weight.view(width, frames, patch, patch, 3).permute(0, 4, 1, 2, 3).reshape(shape)

    return Entry({"patch_embed.weight": width}, name, shape, read, write)


def square_entries(config: EncoderConfig) -> list[Entry]:
    """All but the norm behind the last block."""
    width = config.width
    found = [pixels_first(config, "embeddings.patch_embedding.weight")]
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
    return found


def normed_entries(config: EncoderConfig) -> list[Entry]:
    """The same, and that norm."""
    return [*square_entries(config), *norm("merger_norm", "post_layernorm", config.width)]


SPELLINGS: Final = ({"": "vision_model."}, PLAIN)
IGNORED: Final = r"embeddings\.position_ids|head\..*"


def center_crop(config: EncoderConfig) -> dict[str, Any]:
    """The fields of a processor that resizes the shorter edge and crops a square."""
    side = config.position_grid * config.patch
    crop = {"height": side, "width": side}
    return {"size": {"shortest_edge": side}, "do_center_crop": True, "crop_size": crop}


def _clip_processor(config: EncoderConfig, max_patches: int | None) -> dict[str, Any]:
    del max_patches
    return {"image_processor_type": "CLIPImageProcessor", **center_crop(config)}


def _siglip_processor(config: EncoderConfig, max_patches: int | None) -> dict[str, Any]:
    del max_patches
    side = config.position_grid * config.patch
    return {"image_processor_type": "SiglipImageProcessor", "size": {"height": side, "width": side}}


CLIP: Final = Family(
    "clip_vision_model",
    EncoderConfig,
    read_clip,
    normed_entries,
    IGNORED,
    SPELLINGS,
    "vision_config",
    Alone(
        "CLIPVisionModel",
        _write_clip,
        lambda config: config.class_token and config.class_norm and config.is_bare,
        _clip_processor,
    ),
)
SIGLIP: Final = Family(
    "siglip_vision_model",
    EncoderConfig,
    read_siglip,
    normed_entries,
    IGNORED,
    SPELLINGS,
    "vision_config",
    Alone(
        "SiglipVisionModel",
        _write_siglip,
        lambda config: config.is_bare and not (config.class_token or config.position_scaling),
        _siglip_processor,
    ),
)
