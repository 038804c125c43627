"""The sizes of a model that its `config.json` says, for all families that the trainer has, without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from dataserver.planning.job.fields import ModelSize

MAX_SIZE: Final = 1 << 20
"""Largest width, vocabulary or number of layers."""
_LLAMA: Final = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_SQUARE: Final = {name: _LLAMA[name] for name in ("layers", "width", "mlp_width", "heads")}
_DEEP: Final = {"layers": "depth", "width": "hidden_size", "mlp_width": "intermediate_size", "heads": "num_heads"}
_WHISPER: Final = {"layers": "encoder_layers", "width": "d_model", "mlp_width": "encoder_ffn_dim",
                   "heads": "encoder_attention_heads"}  # fmt: skip
_QWEN2_VL: Final = {"layers": "depth", "width": "embed_dim", "heads": "num_heads"}
_DINO: Final = {name: _LLAMA[name] for name in ("layers", "width", "heads")}


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family's `config.json` says sizes."""

    keys: Mapping[str, str]
    """What it calls the fields of `ModelSize`; where `mlp_width` is none of them, `mlp_ratio` is."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that released folders leave out."""
    gated: bool = False
    more: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, int]] = lambda _part, _whole: {}
    """Further fields of `ModelSize`, of the part and of the whole model that it is in; None says that it is wrong."""


def _windowed(part: Mapping[str, Any], _whole: Mapping[str, Any]) -> Mapping[str, int]:
    """Mistral's and Phi-3's: null where no layer has a window."""
    return {"window": part.get("sliding_window") or 0}


def _some_windowed(part: Mapping[str, Any], _whole: Mapping[str, Any]) -> Mapping[str, int]:
    """Gemma 3's: every sixth layer sees all, unless layers are listed."""
    kinds = part.get("layer_types")
    every = part.get("sliding_window_pattern") or part.get("_sliding_window_pattern") or 6
    several = kinds.count("full_attention") if isinstance(kinds, list) else int(part["num_hidden_layers"]) // int(every)
    return {"window": part.get("sliding_window") or 0, "global_layers": several}


def _windows_of_pixels(part: Mapping[str, Any], _whole: Mapping[str, Any]) -> Mapping[str, int]:
    """Qwen2.5-VL's: squares of whole blocks of patches, but in some layers."""
    block = part.get("spatial_merge_size", 2)
    side = part.get("window_size", 112) // (block * part.get("patch_size", 14)) * block
    return {"window": side**2, "global_layers": len(part.get("fullatt_block_indexes", (7, 15, 23, 31)))}


def _stacked(part: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, int]:
    """Qwen3-VL's: outputs of some layers of the tower go to the first ones of the language model."""
    tower = whole.get("vision_config", part)
    return {"deepstack": len(tower.get("deepstack_visual_indexes", (8, 16, 24)))}


def _gated(part: Mapping[str, Any], _whole: Mapping[str, Any]) -> Mapping[str, int]:
    """DINOv2's giant: an MLP of two thirds, with a gate, in whole eights."""
    if not part.get("use_swiglu_ffn"):
        return {}
    width = part["hidden_size"] * part.get("mlp_ratio", 4)
    return {"gated": True, "mlp_width": (int(width * 2 / 3) + 7) // 8 * 8}


_OF_LLAMA: Final = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
                    "num_attention_heads": 32, "vocab_size": 32_000}  # fmt: skip
_OF_GEMMA3: Final = {
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "vocab_size": 262_208,
}
_GEMMA3: Final = _Form(_LLAMA, _OF_GEMMA3, more=_some_windowed)
_DECODER: Final = _Form(_LLAMA, _OF_LLAMA)
_TOWER: Final = _Form(_SQUARE)
_AUDIO: Final = _Form(_WHISPER)
_QWEN2_5_VL: Final = _Form(_DEEP, gated=True, more=_windows_of_pixels)
_QWEN3_VL: Final = _Form(_DEEP, more=_stacked)
_LLAMAS: Final = ("llama", "qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "gemma")
_SQUARES: Final = ("clip_vision_model", "gemma3", "idefics3", "idefics3_vision", "internvl", "internvl_vision",
                   "siglip_vision_model", "siglip2_vision_model", "smolvlm", "smolvlm_vision")  # fmt: skip
_OF_AUDIO: Final = dict.fromkeys(("whisper", "qwen2_audio", "qwen2_audio_encoder"), _AUDIO)
_TEXTS: Final = ("clip_text_model", "siglip_text_model", "siglip2_text_model")
_FAMILIES: Final[Mapping[str, Mapping[str, _Form]]] = {
    "backbone": {
        **dict.fromkeys(_LLAMAS, _DECODER),
        **dict.fromkeys(("mistral", "phi3"), _Form(_LLAMA, _OF_LLAMA, more=_windowed)),
        **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
        **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), _Form(_LLAMA, more=_stacked)),
    },
    "encoder": {
        **dict.fromkeys(_SQUARES, _TOWER),
        **dict.fromkeys(("dinov2", "dinov2_with_registers"), _Form(_DINO, more=_gated)),
        **dict.fromkeys(("qwen2_vl", "qwen2_vl_vision"), _Form(_QWEN2_VL)),
        **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), _QWEN2_5_VL),
        **dict.fromkeys(("qwen3_vl", "qwen3_vl_vision"), _QWEN3_VL),
        **_OF_AUDIO,
    },
    "audio encoder": _OF_AUDIO,
    "text tower": dict.fromkeys(_TEXTS, _TOWER),
}
"""By what a module is, each `model_type` that the trainer has, and how it says its sizes. A test holds these equal to
what the trainer reads, which brings torch."""
_PARTS: Final = {
    "encoder": ("vision_config", "audio_config"),
    "audio encoder": ("audio_config",),
    "backbone": ("text_config",),
    "text tower": ("text_config",),
}
"""Where the `config.json` of a model of several modules has that of one; without a `model_type` it is the whole's."""
_WHOLE: Final = {
    "clip": {"encoder": "clip_vision_model", "text tower": "clip_text_model"},
    "siglip": {"encoder": "siglip_vision_model", "text tower": "siglip_text_model"},
    "siglip2": {"encoder": "siglip2_vision_model", "text tower": "siglip2_text_model"},
    "llava": {"encoder": "clip_vision_model", "backbone": "llama"},
    "llava_onevision": {"encoder": "siglip_vision_model", "backbone": "qwen2"},
    "internvl": {"backbone": "qwen2"},
    "idefics3": {"backbone": "llama"},
    "smolvlm": {"backbone": "llama"},
}
"""What the parts of a model of several modules are, where they do not say."""
_FEATURE_LAYER: Final = {"llava": -2, "llava_onevision": -1}
"""The layer of a tower whose outputs are taken, by default; those behind it are not read."""


class NetworkError(ValueError):
    """A model that cannot be read, or that is none of the kind."""


def size_of_config(what: str, whole: Mapping[str, Any], path: Path) -> ModelSize:
    """The sizes of a module in the `config.json` of a model.

    Args:
        what: encoder, audio encoder, backbone or text tower.
        whole: what the file holds.
        path: of the file, for errors.

    Raises:
        NetworkError: the model has no such module, or one that the trainer does not have.
    """
    part = next((whole[name] for name in _PARTS.get(what, ()) if isinstance(whole.get(name), dict)), None)
    data = whole if part is None else part
    given = str(data.get("model_type", whole.get("model_type")))
    known = _FAMILIES.get(what, {})
    form = known.get(_WHOLE.get(given, {}).get(what, given))
    if form is None:
        raise NetworkError(
            f"{path}: model_type is {given[:80]!r}; of {what}s {', '.join(sorted(known)) or 'none'} are understood: "
            "give the sizes in a .yaml file instead (layers, width, mlp_width, heads, groups, vocab_size)"
        )
    if part is not None:
        data = {**form.defaults, **{name: value for name, value in part.items() if value is not None}}
    sizes = _sizes_by(form, what, given, data, path)
    try:
        sizes |= form.more(data, whole)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise NetworkError(f"{path}: the layers of {what} {given[:80]!r} are not understood ({error})") from None
    if part is not None and what == "encoder":
        sizes["layers"] = _read_layers(whole, sizes["layers"], path)
    return checked_size(path, sizes)


def _read_layers(whole: Mapping[str, Any], layers: int, path: Path) -> int:
    """How many layers of a tower are read."""
    default = _FEATURE_LAYER.get(str(whole.get("model_type")))
    if default is None:
        return layers
    layer = whole.get("vision_feature_layer")
    layer = default if layer is None else layer
    if type(layer) is not int or not -layers <= layer < 0:
        raise NetworkError(
            f"{path}: vision_feature_layer is {layer!r:.200}; one layer, from -{layers} to -1, is required"
        )
    return layers + 1 + layer


def _sizes_by(form: _Form, what: str, given: str, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The sizes that a family's fields say."""
    keys = form.keys
    sizes = {ours: data[theirs] for ours, theirs in keys.items() if data.get(theirs) is not None}
    missing = [keys[name] for name in ("layers", "width", "heads") if name not in sizes]
    if missing:
        raise NetworkError(
            f"{path}: {', '.join(missing)} of {what} {given[:80]!r} are missing; give a whole config.json"
        )
    wrong = [
        f"{keys[name]} is {value!r:.40}"
        for name, value in sizes.items()
        if type(value) is not int or abs(value) > MAX_SIZE
    ]
    if wrong:
        raise NetworkError(f"{path}: {', '.join(wrong)}; integers up to {MAX_SIZE} are required")
    if "mlp_width" not in keys:
        ratio = data.get("mlp_ratio", 4)
        if type(ratio) not in (int, float) or not 0 < ratio <= MAX_SIZE:
            raise NetworkError(f"{path}: mlp_ratio is {ratio!r:.40}; a number above 0 is required")
        sizes["mlp_width"] = int(sizes["width"] * ratio)
    head = data.get("head_dim")
    if head is not None and (type(head) is not int or head * sizes["heads"] != sizes["width"]):
        sizes["head_dim"] = head
    return {**sizes, "gated": form.gated}


_OPTIONAL: Final = {"head_dim": 0, "gated": False, "window": 0, "global_layers": 0, "deepstack": 0, "vocab_size": 0}
"""Sizes that need not be given."""


def checked_size(path: Path, data: Mapping[str, Any]) -> ModelSize:
    """Sizes by their names; NetworkError where some are unknown, missing or wrong."""
    known = {f.name for f in fields(ModelSize)} - {"causal"}
    values = {**_OPTIONAL, "groups": data.get("heads"), **data}
    unknown, missing = sorted(values.keys() - known), sorted(known - values.keys())
    if unknown or missing:
        raise NetworkError(f"{path}: lacks {missing}, has the unknown {unknown}; {sorted(known)} are required")
    for name, value in values.items():
        if name == "gated":
            if type(value) is not bool:
                raise NetworkError(f"{path}: gated is {value!r:.40}; true or false is required")
        elif type(value) is not int or not (0 if name in _OPTIONAL else 1) <= value <= MAX_SIZE:
            raise NetworkError(f"{path}: {name} is {value!r:.40}; an integer from 1 to {MAX_SIZE} is required")
    size = ModelSize(**values)
    if (not size.head_dim and size.width % size.heads) or size.heads % size.groups:
        raise NetworkError(
            f"{path}: width is {size.width}, heads {size.heads}, groups {size.groups}; heads must divide the width, "
            "and groups the heads; or give head_dim"
        )
    if size.global_layers > size.layers:
        raise NetworkError(f"{path}: global_layers is {size.global_layers}; there are {size.layers} layers")
    return size
