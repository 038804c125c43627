"""Llama, Mistral, Qwen2 and Qwen3: decoders with RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.mapping import Alone, Entry, Family, linear, table, vector
from trainclient.models.rotary import RotaryScaling, RotarySections

MAX_POSITIONS: Final = 1 << 30


def read_backbone(
    fields: Fields, whole: Fields, *, positions: int, tied: bool = False, **changes: Any
) -> BackboneConfig:
    """Sizes of a decoder with the fields that all of them have.

    Args:
        fields: of the decoder.
        whole: of the model that it is part of.
        positions: its longest sequence, where it names none.
        tied: whether its head is its embedding, where neither says.
        changes: sizes of its family.
    """
    fields.require("attention_dropout", 0, "our attention drops nothing out")
    width, heads = fields.integer("hidden_size", 4096), fields.integer("num_attention_heads", 32)
    groups = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", max(1, width // heads))
    if heads % groups or head_dim % 2:
        raise fields.refusal("num_key_value_heads" if heads % groups else "head_dim", "it must divide the heads evenly")
    base, scaling, sections = (0.0, None, None) if "rotary_base" in changes else rotary(fields)
    if sections is not None and 2 * sum(sections.pairs) != head_dim:
        raise fields.refusal("head_dim", f"{2 * sum(sections.pairs)}, twice the sum of mrope_section, is required")
    found = {
        "layers": fields.integer("num_hidden_layers", 32, MAX_LAYERS),
        "width": width,
        "mlp_width": fields.integer("intermediate_size", 11008),
        "heads": heads,
        "groups": groups,
        "rotary_base": base,
        "vocab_size": fields.integer("vocab_size", 32000),
        "query_tokens": 0,
        "head_dim": head_dim,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rotary_scaling": scaling,
        "sections": sections,
        "positions": fields.integer("max_position_embeddings", positions, MAX_POSITIONS),
        "tied": _is_tied(fields, whole, tied),
    }
    return BackboneConfig(**found | changes)


_TIED_BY_EITHER: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "llava"})
"""Whole models whose older files say of the language model alone that its head is its embedding."""


def _is_tied(fields: Fields, whole: Fields, default: bool) -> bool:
    """As transformers has it: what the whole model says, and for some what its language model says."""
    said = [f.flag("tie_word_embeddings", False) for f in (whole, fields) if f.has("tie_word_embeddings")]
    if whole.data.get("model_type") in _TIED_BY_EITHER:
        return any(said)
    return said[0] if said else default


def _read_llama(fields: Fields, whole: Fields) -> BackboneConfig:
    fields.require("hidden_act", "silu", "our MLP is SwiGLU")
    fields.require("mlp_bias", False, "our MLP has no biases")
    bias = fields.flag("attention_bias", False)
    return read_backbone(fields, whole, positions=2048, qkv_bias=bias, output_bias=bias)


def _read_mistral(fields: Fields, whole: Fields) -> BackboneConfig:
    fields.require("hidden_act", "silu", "our MLP is SwiGLU")
    window = fields.integer("sliding_window", 4096, MAX_POSITIONS) if _windowed(fields) else 0
    return read_backbone(fields, whole, positions=131072, window=window)


def _windowed(fields: Fields) -> bool:
    """Whether a Mistral has windows: where it does not say, it has, and null says that it has none."""
    return fields.has("sliding_window") or "sliding_window" not in fields.data


def require_whole_sequences(fields: Fields) -> None:
    """Refuse a Qwen with windows."""
    fields.require("use_sliding_window", False, "our attention sees the whole sequence")
    kinds = fields.data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise fields.refusal("layer_types", "full_attention is required of every layer")


def _read_qwen2(fields: Fields, whole: Fields) -> BackboneConfig:
    fields.require("hidden_act", "silu", "our MLP is SwiGLU")
    require_whole_sequences(fields)
    return read_backbone(fields, whole, positions=32768, qkv_bias=True)


def _read_qwen3(fields: Fields, whole: Fields) -> BackboneConfig:
    fields.require("hidden_act", "silu", "our MLP is SwiGLU")
    require_whole_sequences(fields)
    bias = fields.flag("attention_bias", False)
    return read_backbone(fields, whole, positions=32768, head_norms=True, qkv_bias=bias, output_bias=bias)


def rotary(fields: Fields, named: str | None = None) -> tuple[float, RotaryScaling | None, RotarySections | None]:
    """Base, scaling and sections, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`.

    Args:
        fields: of a decoder.
        named: the field of `rope_parameters` that holds them, where layers differ.
    """
    rope = fields.within("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    rope = rope if named is None else rope.within(named)
    rope.require("partial_rotary_factor", 1.0, "our rotary positions turn whole heads")
    base = (rope if rope.has("rope_theta") else fields).number("rope_theta", 10_000.0)
    key = "rope_type" if rope.has("rope_type") else "type"
    known = {"default": "default", "linear": "linear", "llama3": "llama3", "mrope": "default"}
    kind = rope.choice(key, known, "default")
    sections = _sections(rope) if rope.has("mrope_section") else None
    if kind == "default":
        return base, None, sections
    if kind == "linear":
        return base, RotaryScaling(rope.number("factor")), sections
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.refusal("high_freq_factor", f"more than low_freq_factor, {low}, is required")
    original = rope.integer("original_max_position_embeddings", most=MAX_POSITIONS)
    return base, RotaryScaling(rope.number("factor"), original, low, high), sections


def _sections(rope: Fields) -> RotarySections:
    pairs = rope.data["mrope_section"]
    if not isinstance(pairs, list) or len(pairs) != 3 or any(type(n) is not int or not 0 < n < 4096 for n in pairs):
        raise rope.refusal("mrope_section", "three positive integers are required")
    return RotarySections((pairs[0], pairs[1], pairs[2]), rope.flag("mrope_interleaved", False))


def write_backbone(config: BackboneConfig) -> dict[str, Any]:
    """The fields that all families have."""
    rope: dict[str, Any] = {"rope_theta": config.rotary_base, "rope_type": "default"}
    scaling = config.rotary_scaling
    if scaling is not None:
        rope |= {"rope_type": "linear", "factor": scaling.factor}
        if scaling.original_positions:
            rope |= {
                "rope_type": "llama3",
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original_positions,
            }
    return {
        **({"max_position_embeddings": config.positions} if config.positions else {}),
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.groups,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rotary_base,
        "rope_scaling": None if scaling is None else {key: rope[key] for key in rope if key != "rope_theta"},
        "tie_word_embeddings": config.tied,
        "vocab_size": config.vocab_size,
    }


def _write_llama(config: BackboneConfig) -> dict[str, Any]:
    if config.qkv_bias != config.output_bias:
        raise PretrainedError(
            f"qkv_bias is {config.qkv_bias} and output_bias {config.output_bias}; llama has both or neither"
        )
    return {
        **write_backbone(config),
        "attention_bias": config.qkv_bias,
        "head_dim": config.head_size,
        "mlp_bias": False,
    }


def require_equal_heads(config: BackboneConfig, family: str) -> None:
    """Refuse to export heads that do not make up the width to a family whose files do not say their size."""
    if config.head_size * config.heads != config.width:
        raise PretrainedError(
            f"head_dim is {config.head_size}; {family} of width {config.width} with {config.heads} heads has "
            f"{config.width / config.heads:g}"
        )


def _write_qwen2(config: BackboneConfig) -> dict[str, Any]:
    require_equal_heads(config, "qwen2")
    return {**write_backbone(config), "use_sliding_window": False}


def _write_qwen3(config: BackboneConfig) -> dict[str, Any]:
    return {**_write_llama(config), "use_sliding_window": False, "sliding_window": None}


def _write_mistral(config: BackboneConfig) -> dict[str, Any]:
    return {**write_backbone(config), "head_dim": config.head_size, "sliding_window": config.window or None}


def block_entries(config: BackboneConfig, number: int, mlp_norm: str = "post_attention_layernorm") -> list[Entry]:
    """The entries of a block.

    Args:
        config: sizes of the decoder.
        number: of the block.
        mlp_norm: name of the norm before the MLP.
    """
    width, inner, shared = config.width, config.heads * config.head_size, config.groups * config.head_size
    ours, theirs = f"layers.{number}", f"model.layers.{number}"
    head_norms = ("query", "q"), ("key", "k")
    return [
        vector(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", width),
        *linear(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj", inner, width, bias=config.qkv_bias),
        *linear(f"{ours}.attention.key", f"{theirs}.self_attn.k_proj", shared, width, bias=config.qkv_bias),
        *linear(f"{ours}.attention.value", f"{theirs}.self_attn.v_proj", shared, width, bias=config.qkv_bias),
        *linear(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", width, inner, bias=config.output_bias),
        *(
            vector(f"{ours}.attention.{here}_norm.weight", f"{theirs}.self_attn.{there}_norm.weight", config.head_size)
            for here, there in (head_norms if config.head_norms else ())
        ),
        vector(f"{ours}.mlp_norm.weight", f"{theirs}.{mlp_norm}.weight", width),
        *linear(f"{ours}.mlp.gate", f"{theirs}.mlp.gate_proj", config.mlp_width, width, bias=False),
        *linear(f"{ours}.mlp.up", f"{theirs}.mlp.up_proj", config.mlp_width, width, bias=False),
        *linear(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", width, config.mlp_width, bias=False),
    ]


def backbone_entries(config: BackboneConfig, blocks: Iterable[Entry] | None = None) -> list[Entry]:
    """All entries of a decoder; `blocks` are those of its blocks, where these have further ones."""
    if blocks is None:
        blocks = (entry for number in range(config.layers) for entry in block_entries(config, number))
    found = [table("embed.weight", "model.embed_tokens.weight", config.vocab_size, config.width), *blocks]
    found.append(vector("norm.weight", "model.norm.weight", config.width))
    if not config.tied:
        found.append(table("head.weight", "lm_head.weight", config.vocab_size, config.width))
    return found


IGNORED: Final = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


def _is_plain(config: BackboneConfig) -> bool:
    """Whether a decoder has nothing that Llama does not have, but for biases."""
    special = config.head_norms, config.offset_norms, config.sections, config.window, config.two_way_images
    return not any(special)


def is_windowed_llama(config: BackboneConfig) -> bool:
    """Whether a decoder has nothing that Llama does not have, but for windows in all layers."""
    special = config.global_layers or config.qkv_bias or config.output_bias
    return not special and _is_plain(replace(config, window=0))


def _has_biases_as_qwen2(config: BackboneConfig) -> bool:
    return config.qkv_bias and not config.output_bias


def _family(
    name: str,
    architecture: str,
    read: Callable[[Fields, Fields], BackboneConfig],
    write: Callable[[BackboneConfig], dict[str, Any]],
    suits: Callable[[BackboneConfig], bool],
) -> Family[BackboneConfig]:
    alone = Alone(architecture, write, suits)
    return Family(name, BackboneConfig, read, backbone_entries, IGNORED, alone=alone)


LLAMA: Final = _family(
    "llama",
    "LlamaForCausalLM",
    _read_llama,
    _write_llama,
    lambda config: _is_plain(config) and not _has_biases_as_qwen2(config),
)
QWEN2: Final = _family(
    "qwen2",
    "Qwen2ForCausalLM",
    _read_qwen2,
    _write_qwen2,
    lambda config: _is_plain(config) and _has_biases_as_qwen2(config),
)
QWEN3: Final = _family(
    "qwen3",
    "Qwen3ForCausalLM",
    _read_qwen3,
    _write_qwen3,
    lambda config: config.head_norms and _is_plain(replace(config, head_norms=False)),
)
MISTRAL: Final = _family(
    "mistral",
    "MistralForCausalLM",
    _read_mistral,
    _write_mistral,
    is_windowed_llama,
)
