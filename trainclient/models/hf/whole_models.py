"""Models of a vision tower, a projector and a language model, whose folder is an encoder and a backbone of ours.

The projector belongs to the encoder. Names of the tower begin with `vision_tower.` here, and those of the projector
with `multi_modal_projector.`, whatever files say.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.backbones import LLAMA, MISTRAL, QWEN2, QWEN3
from trainclient.models.hf.class_token_towers import internvit_entries, read_internvit
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.gemma import GEMMA3
from trainclient.models.hf.mapping import Entry, Family, Names, linear, norm, transposed, vector, within
from trainclient.models.hf.phi import PHI3
from trainclient.models.hf.qwen_towers import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from trainclient.models.hf.towers import normed_entries, read_clip, read_siglip, side, square_entries

TEXT: Final = "text_config"
VISION: Final = "vision_config"


@dataclass(frozen=True, slots=True)
class WholeModel:
    """How a whole model consists of an encoder and a backbone."""

    vision: Family[EncoderConfig]
    texts: Mapping[str, Family[BackboneConfig]]
    """Families of backbones by the `model_type` of the language model; the first one where it does not say."""

    def families(self, whole: Fields) -> tuple[Family[Any], ...]:
        """The two parts of a checkpoint; PretrainedError for a language model that our backbones cannot be."""
        fields = whole.within(TEXT)
        name = fields.data.get("model_type") if whole.has(TEXT) else None
        name = next(iter(self.texts)) if name is None else name
        if not isinstance(name, str) or name not in self.texts:
            raise fields.refusal("model_type", f"one of {', '.join(self.texts)} is required in such a model")
        return self.vision, self.texts[name]


def _projected(fields: Fields, whole: Fields, default: int, **changes: Any) -> EncoderConfig:
    """A tower of SigLIP's kind with the width of the language model behind it."""
    width = whole.within(TEXT).integer("hidden_size", default)
    return read_siglip(fields, whole, output_dim=width, **changes)


def _read_llava(fields: Fields, whole: Fields) -> EncoderConfig:
    whole.require("multimodal_projector_bias", True, "our projector's layers have biases")
    whole.require("projector_hidden_act", "gelu", "our projector's activation")
    kinds = {"clip_vision_model": read_clip, "siglip_vision_model": read_siglip}
    kind = fields.choice("model_type", {name: name for name in kinds}, "clip_vision_model")
    has_class_token = kind == "clip_vision_model"
    chosen = whole.choice("vision_feature_select_strategy", {"default": "default", "full": "full"}, "default")
    if has_class_token != (chosen == "default"):
        wanted = "default" if has_class_token else "full"
        raise whole.refusal("vision_feature_select_strategy", f"{wanted} is required: rows of all patches alone")
    layers = _layers_up_to(whole, -2, fields.integer("num_hidden_layers", 24, MAX_LAYERS))
    width = whole.within(TEXT).integer("hidden_size", 4096)
    return kinds[kind](fields, whole, projector="mlp", output_dim=width, layers=layers)


def _layers_up_to(whole: Fields, default: int, layers: int) -> int:
    """How many of a tower's layers run: up to the one whose output is taken."""
    layer = whole.value("vision_feature_layer", default)
    if type(layer) is not int or not -layers <= layer < 0:
        raise whole.refusal("vision_feature_layer", f"one layer, from -{layers} to -1, is required")
    return layers + 1 + layer


def _llava_entries(config: EncoderConfig) -> list[Entry]:
    width, rows = config.width * config.merge**2, config.output_dim
    return [
        *within("vision_tower.", square_entries(config)),
        *linear("merger.up", "multi_modal_projector.linear_1", rows, width, bias=True),
        *linear("merger.down", "multi_modal_projector.linear_2", rows, rows, bias=True),
    ]


def _read_onevision(fields: Fields, whole: Fields) -> EncoderConfig:
    whole.require("multimodal_projector_bias", True, "our projector's layers have biases")
    whole.require("projector_hidden_act", "gelu", "our projector's activation")
    whole.require("vision_feature_select_strategy", "full", "rows of all patches, since SigLIP has no class token")
    fields.require("model_type", "siglip_vision_model", "the tower of LLaVA-OneVision")
    found = fields.with_defaults(_ONEVISION_TOWER)
    layers = _layers_up_to(whole, -1, found.integer("num_hidden_layers", most=MAX_LAYERS))
    return _projected(found, whole, 4096, projector="mlp", layers=layers, line_ends=True)


def _onevision_entries(config: EncoderConfig) -> list[Entry]:
    return [*_llava_entries(config), vector("line_end", "image_newline", config.output_dim)]


def _read_internvl(fields: Fields, whole: Fields) -> EncoderConfig:
    whole.require("projector_hidden_act", "gelu", "our projector's activation")
    whole.require("vision_feature_layer", -1, "rows of the last layer")
    whole.require("vision_feature_select_strategy", "default", "rows of patches alone")
    merge = {0.5: 2, 0.25: 4, 1.0: 1}.get(whole.number("downsample_ratio", 0.5))
    if merge is None:
        raise whole.refusal("downsample_ratio", "0.5, 0.25 or 1 is required")
    width = whole.within(TEXT).integer("hidden_size", 4096)
    return read_internvit(fields, projector="normed_mlp", merge=merge, output_dim=width)


def _internvl_entries(config: EncoderConfig) -> list[Entry]:
    merged, rows, name = config.width * config.merge**2, config.output_dim, "multi_modal_projector"
    return [
        *within("vision_tower.", internvit_entries(config)),
        *norm("merger.norm", f"{name}.layer_norm", merged),
        *linear("merger.mlp.up", f"{name}.linear_1", rows, merged, bias=True),
        *linear("merger.mlp.down", f"{name}.linear_2", rows, rows, bias=True),
    ]


def _read_gemma3(fields: Fields, whole: Fields) -> EncoderConfig:
    tokens, patches = whole.integer("mm_tokens_per_image", 256), side(fields, "image_size", 224)
    patches //= side(fields, "patch_size", 16)
    across = round(tokens**0.5)
    if across**2 != tokens or patches % across:
        raise whole.refusal("mm_tokens_per_image", f"the square of a divisor of {patches} is required")
    return _projected(fields, whole, 2304, projector="pool", merge=patches // across)


def _gemma3_entries(config: EncoderConfig) -> list[Entry]:
    name = "multi_modal_projector.mm_input_projection_weight"
    return [
        *within("vision_tower.", normed_entries(config)),
        vector("merger.norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight", config.width),
        transposed("merger.linear.weight", name, config.output_dim, config.width),
    ]


def _read_idefics3(fields: Fields, whole: Fields) -> EncoderConfig:
    defaults = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    merge = whole.integer("scale_factor", 2, 64)
    found = fields.with_defaults(defaults)
    return _projected(found, whole, 4096, projector="linear", merge=merge, position_scaling="nearest")


def _idefics3_entries(config: EncoderConfig) -> list[Entry]:
    width = config.width * config.merge**2
    name = "multi_modal_projector.modality_projection.proj"
    tower = within("vision_tower.", normed_entries(config))
    return [*tower, *linear("merger", name, config.output_dim, width, bias=False)]


_ONEVISION_TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
}
_READ_ALONE: Final = r"vision_tower\.(embeddings\.position_ids|head\..*)"
_LLAVA_UNREAD: Final = (
    r"vision_tower\.(encoder\.layers\.(?P<layer>\d{1,6})\..*|post_layernorm\..*|embeddings\.position_ids|head\..*)"
)
_TOWERS: Final[tuple[Names, ...]] = tuple(
    {
        "vision_tower.": f"{model}vision_tower.{inner}",
        "multi_modal_projector.": f"{model}multi_modal_projector.",
        "image_newline": f"{model}image_newline",
    }
    for model in ("", "model.")
    for inner in ("vision_model.", "")
)
_LANGUAGE_MODELS: Final[tuple[Names, ...]] = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model.", "lm_head.": "lm_head."},
)
_QWEN_TEXTS: Final[tuple[Names, ...]] = (
    {"model.": "model.language_model.", "lm_head.": "lm_head."},
    {"model.": "model.", "lm_head.": "lm_head."},
)
_IDEFICS_TEXTS: Final[tuple[Names, ...]] = ({"model.": "model.text_model.", "lm_head.": "lm_head."},)
_IDEFICS_TOWERS: Final[tuple[Names, ...]] = (
    {"vision_tower.": "model.vision_model.", "multi_modal_projector.": "model.connector."},
)


def _tower(
    name: str,
    read: Callable[[Fields, Fields], EncoderConfig],
    entries: Callable[[EncoderConfig], list[Entry]],
    ignored: str,
    spellings: tuple[Names, ...],
) -> Family[EncoderConfig]:
    return Family(name, EncoderConfig, read, entries, ignored, spellings, VISION)


def _texts(spellings: tuple[Names, ...], **families: Family[BackboneConfig]) -> dict[str, Family[BackboneConfig]]:
    """Families of language models as parts of a whole one."""
    parts = {"section": TEXT, "spellings": spellings, "alone": None}
    return {name: replace(family, **parts) for name, family in families.items()}  # type: ignore[arg-type]


_QWEN2_VL_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3_VL_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
}


def _qwen2_vl_text(fields: Fields, whole: Fields) -> BackboneConfig:
    fields = fields.with_defaults(_QWEN2_VL_DEFAULTS)
    return _with_sections(QWEN2.read(fields, whole), fields)


def _qwen3_vl_text(fields: Fields, whole: Fields) -> BackboneConfig:
    fields = fields.with_defaults(_QWEN3_VL_DEFAULTS)
    found = _with_sections(QWEN3.read(fields, whole), fields)
    sections = None if found.sections is None else replace(found.sections, interleaved=True)
    deepstack = len(QWEN3_VL.read(whole.within(VISION), whole).deepstack)
    if deepstack > found.layers:
        raise whole.refusal("vision_config", f"at most {found.layers} deepstack_visual_indexes are required")
    return replace(found, sections=sections, deepstack=deepstack)


def _with_sections(found: BackboneConfig, fields: Fields) -> BackboneConfig:
    if found.sections is None:
        raise fields.refusal("rope_scaling", "mrope_section is required in it")
    return found


_QWEN2_VL_TEXT: Final = replace(QWEN2, read=_qwen2_vl_text)
_LLAVA: Final = WholeModel(
    _tower("llava", _read_llava, _llava_entries, _LLAVA_UNREAD, _TOWERS),
    _texts(_LANGUAGE_MODELS, llama=LLAMA, qwen2=QWEN2, qwen3=QWEN3, mistral=MISTRAL, phi3=PHI3),
)
_IDEFICS3: Final = WholeModel(
    _tower("idefics3", _read_idefics3, _idefics3_entries, _READ_ALONE, _IDEFICS_TOWERS),
    _texts(_IDEFICS_TEXTS, llama=LLAMA, qwen2=QWEN2, mistral=MISTRAL),
)
WHOLE_MODELS: Final[Mapping[str, WholeModel]] = {
    "qwen2_vl": WholeModel(QWEN2_VL, _texts(_QWEN_TEXTS, qwen2_vl_text=_QWEN2_VL_TEXT)),
    "qwen2_5_vl": WholeModel(QWEN2_5_VL, _texts(_QWEN_TEXTS, qwen2_5_vl_text=_QWEN2_VL_TEXT)),
    "qwen3_vl": WholeModel(QWEN3_VL, _texts(_QWEN_TEXTS, qwen3_vl_text=replace(QWEN3, read=_qwen3_vl_text))),
    "llava": _LLAVA,
    "llava_onevision": WholeModel(
        _tower("llava_onevision", _read_onevision, _onevision_entries, _LLAVA_UNREAD, _TOWERS),
        _texts(_LANGUAGE_MODELS, qwen2=QWEN2, llama=LLAMA, qwen3=QWEN3, mistral=MISTRAL),
    ),
    "internvl": WholeModel(
        _tower("internvl", _read_internvl, _internvl_entries, r"vision_tower\.embeddings\.mask_token", _TOWERS[1::2]),
        _texts(_LANGUAGE_MODELS, qwen2=QWEN2, llama=LLAMA, qwen3=QWEN3),
    ),
    "gemma3": WholeModel(
        _tower("gemma3", _read_gemma3, _gemma3_entries, _READ_ALONE, _TOWERS),
        _texts(_LANGUAGE_MODELS, gemma3_text=GEMMA3),
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
}
"""Families of whole models, by the `model_type` of their config.json."""
