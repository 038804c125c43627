"""Llama and Qwen2: decoders with RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

from typing import Any, Final

from trainclient.models.backbone import BackboneConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.mapping import Entry, Family, linear, table, vector
from trainclient.models.layers import RotaryScaling

MAX_POSITIONS: Final = 1 << 30


def _read(fields: Fields, *, qkv_bias: bool, output_bias: bool, positions: int) -> BackboneConfig:
    fields.require("hidden_act", "silu", "our MLP is SwiGLU")
    fields.require("attention_dropout", 0, "our attention drops nothing out")
    width, heads = fields.integer("hidden_size", 4096), fields.integer("num_attention_heads", 32)
    groups = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", max(1, width // heads))
    if heads % groups or head_dim % 2:
        raise fields.refusal("num_key_value_heads" if heads % groups else "head_dim", "it must divide the heads evenly")
    base, scaling = _rotary(fields)
    return BackboneConfig(
        layers=fields.integer("num_hidden_layers", 32, MAX_LAYERS),
        width=width,
        mlp_width=fields.integer("intermediate_size", 11008),
        heads=heads,
        groups=groups,
        rotary_base=base,
        vocab_size=fields.integer("vocab_size", 32000),
        query_tokens=0,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        rotary_scaling=scaling,
        positions=fields.integer("max_position_embeddings", positions, MAX_POSITIONS),
    )


def _read_llama(fields: Fields) -> BackboneConfig:
    fields.require("mlp_bias", False, "our MLP has no biases")
    bias = fields.flag("attention_bias", False)
    return _read(fields, qkv_bias=bias, output_bias=bias, positions=2048)


def _read_qwen2(fields: Fields) -> BackboneConfig:
    fields.require("use_sliding_window", False, "our attention sees the whole sequence")
    kinds = fields.data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise fields.refusal("layer_types", "full_attention is required of every layer")
    return _read(fields, qkv_bias=True, output_bias=False, positions=32768)


def _rotary(fields: Fields) -> tuple[float, RotaryScaling | None]:
    """Base and scaling, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    named = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = fields.within(named)
    rope.require("partial_rotary_factor", 1.0, "our rotary positions turn whole heads")
    base = (rope if rope.has("rope_theta") else fields).number("rope_theta", 10_000.0)
    key = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.choice(key, {"default": "default", "linear": "linear", "llama3": "llama3"}, "default")
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RotaryScaling(rope.number("factor"))
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.refusal("high_freq_factor", f"more than low_freq_factor, {low}, is required")
    original = rope.integer("original_max_position_embeddings", most=MAX_POSITIONS)
    return base, RotaryScaling(rope.number("factor"), original, low, high)


def _write(config: BackboneConfig) -> dict[str, Any]:
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
        "rope_scaling": None if scaling is None else rope,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def _write_llama(config: BackboneConfig) -> dict[str, Any]:
    if config.qkv_bias != config.output_bias:
        raise PretrainedError(
            f"qkv_bias is {config.qkv_bias} and output_bias {config.output_bias}; llama has both or neither"
        )
    return {**_write(config), "attention_bias": config.qkv_bias, "head_dim": config.head_size, "mlp_bias": False}


def _write_qwen2(config: BackboneConfig) -> dict[str, Any]:
    if config.head_size * config.heads != config.width:
        raise PretrainedError(
            f"head_dim is {config.head_size}; qwen2 of width {config.width} with {config.heads} heads has "
            f"{config.width / config.heads:g}"
        )
    return {**_write(config), "use_sliding_window": False}


def _entries(config: BackboneConfig) -> list[Entry]:
    width, inner = config.width, config.heads * config.head_size
    shared = config.groups * config.head_size
    found = [table("embed.weight", "model.embed_tokens.weight", config.vocab_size, width)]
    for number in range(config.layers):
        ours, theirs = f"layers.{number}", f"model.layers.{number}"
        found += [
            vector(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", width),
            *linear(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj", inner, width, bias=config.qkv_bias),
            *linear(f"{ours}.attention.key", f"{theirs}.self_attn.k_proj", shared, width, bias=config.qkv_bias),
            *linear(f"{ours}.attention.value", f"{theirs}.self_attn.v_proj", shared, width, bias=config.qkv_bias),
            *linear(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", width, inner, bias=config.output_bias),
            vector(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", width),
            *linear(f"{ours}.mlp.gate", f"{theirs}.mlp.gate_proj", config.mlp_width, width, bias=False),
            *linear(f"{ours}.mlp.up", f"{theirs}.mlp.up_proj", config.mlp_width, width, bias=False),
            *linear(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", width, config.mlp_width, bias=False),
        ]
    found.append(vector("norm.weight", "model.norm.weight", width))
    found.append(table("head.weight", "lm_head.weight", config.vocab_size, width))
    return found


_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_IGNORED = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


def _has_biases_as_qwen2(config: BackboneConfig) -> bool:
    return config.qkv_bias and not config.output_bias


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    BackboneConfig,
    _read_llama,
    _write_llama,
    _entries,
    ("",),
    _IGNORED,
    suits=lambda config: not _has_biases_as_qwen2(config),
    speaks=True,
    tied=_TIED,
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    BackboneConfig,
    _read_qwen2,
    _write_qwen2,
    _entries,
    ("",),
    _IGNORED,
    suits=_has_biases_as_qwen2,
    speaks=True,
    tied=_TIED,
)
