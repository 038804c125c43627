"""Gemma: norms whose weights count from one, scaled embeddings. In Gemma 3 norms follow layers too, and windows have a
rotary base of their own."""

from collections.abc import Iterator
from typing import Any, Final

from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.hf.backbones import (
    IGNORED,
    MAX_POSITIONS,
    backbone_entries,
    block_entries,
    read_backbone,
    rotary,
    write_backbone,
)
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.mapping import Alone, Entry, Family, vector

_DEFAULTS: Final = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_FIRST_DEFAULTS: Final = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 256,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GATE: Final = "gelu_pytorch_tanh"


def _read(given: Fields, whole: Fields) -> BackboneConfig:
    fields = given.with_defaults(_DEFAULTS)
    fields.require("hidden_activation", _GATE, "Gemma's gate")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(name):
            raise fields.refusal(name, "null is required: our scores and logits have no caps")
    fields.require("use_bidirectional_attention", False, "our backbones are causal")
    bias = fields.flag("attention_bias", False)
    (base, scaling), (windowed_base, windowed_scaling) = _rotations(fields)
    if windowed_scaling is not None:
        raise fields.refusal("rope_parameters", "windowed layers without scaling are required")
    return read_backbone(
        fields,
        whole,
        positions=131072,
        tied=True,
        rotary_base=base,
        rotary_scaling=scaling,
        windowed_rotary_base=windowed_base,
        window=fields.integer("sliding_window", 4096, MAX_POSITIONS),
        global_layers=_global_layers(fields),
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
        offset_norms=True,
        post_norms=True,
        activation="gelu_tanh",
        embed_scale=fields.integer("hidden_size") ** 0.5,
        score_scale=fields.integer("query_pre_attn_scalar", 256) ** -0.5,
        two_way_images=whole.data.get("model_type") == "gemma3",
    )


def _rotations(fields: Fields) -> tuple[tuple[float, Any], tuple[float, Any]]:
    """Base and scaling of layers that see all, and of windowed ones."""
    if fields.has("rope_parameters"):
        full, sliding = rotary(fields, _FULL), rotary(fields, _SLIDING)
        return full[:2], sliding[:2]
    base = fields.number("rope_theta", 1_000_000.0)
    return (base, rotary(fields)[1]), (fields.number("rope_local_base_freq", 10_000.0), None)


def _global_layers(fields: Fields) -> tuple[int, ...]:
    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = fields.data.get("layer_types")
    if kinds is None:
        pattern = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
        every = fields.integer(pattern, 6)
        return tuple(number for number in range(layers) if not (number + 1) % every)
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {_SLIDING, _FULL}:
        raise fields.refusal("layer_types", f"{_SLIDING} or {_FULL} is required of each of the {layers} layers")
    return tuple(number for number, kind in enumerate(kinds) if kind == _FULL)


def _write(config: BackboneConfig) -> dict[str, Any]:
    shared = write_backbone(config)
    sliding = {"rope_type": "default", "rope_theta": config.windowed_rotary_base}
    return {
        **{name: value for name, value in shared.items() if name != "hidden_act"},
        "attention_bias": config.qkv_bias,
        "head_dim": config.head_size,
        "hidden_activation": _GATE,
        "layer_types": [_FULL if number in config.global_layers else _SLIDING for number in range(config.layers)],
        "query_pre_attn_scalar": round(config.score_scale**-2),
        "rope_parameters": {_FULL: shared["rope_parameters"], _SLIDING: sliding},
        "rope_local_base_freq": config.windowed_rotary_base,  # as releases before 5 have it
        "sliding_window": config.window,
    }


def _entries(config: BackboneConfig) -> list[Entry]:
    def blocks() -> Iterator[Entry]:
        for number in range(config.layers):
            ours, theirs = f"layers.{number}", f"model.layers.{number}"
            yield from block_entries(config, number, "pre_feedforward_layernorm")
            for here, there in (("attention", "attention"), ("mlp", "feedforward")):
                name = f"{theirs}.post_{there}_layernorm.weight"
                yield vector(f"{ours}.{here}_post_norm.weight", name, config.width)

    return backbone_entries(config, blocks())


GEMMA3: Final = Family(
    "gemma3_text",
    BackboneConfig,
    _read,
    _entries,
    IGNORED,
    alone=Alone(
        "Gemma3ForCausalLM",
        _write,
        lambda config: config.offset_norms and config.post_norms and config.head_norms and not config.two_way_images,
    ),
)


def _read_first(given: Fields, whole: Fields) -> BackboneConfig:
    """Sizes of the first Gemma. Released files say gelu and mean its approximation, as transformers takes it."""
    fields = given.with_defaults(_FIRST_DEFAULTS)
    for name in ("hidden_act", "hidden_activation"):
        fields.choice(name, dict.fromkeys(("gelu", _GATE), "gelu_tanh"), _GATE)
    fields.require("use_bidirectional_attention", False, "our backbones are causal")
    bias = fields.flag("attention_bias", False)
    return read_backbone(
        fields,
        whole,
        positions=8192,
        tied=True,
        qkv_bias=bias,
        output_bias=bias,
        offset_norms=True,
        activation="gelu_tanh",
        embed_scale=fields.integer("hidden_size") ** 0.5,
    )


def _write_first(config: BackboneConfig) -> dict[str, Any]:
    return {
        **write_backbone(config),
        "attention_bias": config.qkv_bias,
        "head_dim": config.head_size,
        "hidden_act": _GATE,
        "hidden_activation": _GATE,
    }


GEMMA: Final = Family(
    "gemma",
    BackboneConfig,
    _read_first,
    backbone_entries,
    IGNORED,
    alone=Alone(
        "GemmaForCausalLM",
        _write_first,
        lambda config: config.offset_norms and not (config.post_norms or config.head_norms or config.window),
    ),
)
