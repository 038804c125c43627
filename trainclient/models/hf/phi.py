"""Phi-3 and Phi-4: Llama's decoder with several projections in one tensor; those with plain rotary positions alone."""

from collections.abc import Iterator
from typing import Any, Final

from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.hf.backbones import (
    IGNORED,
    MAX_POSITIONS,
    backbone_entries,
    is_windowed_llama,
    read_backbone,
    require_equal_heads,
    write_backbone,
)
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.mapping import Alone, Entry, Family, linear, stacked, vector

_DEFAULTS: Final = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
}
_LENGTHENED: Final = ("longrope", "su", "yarn")
"""Kinds of rotary positions whose wave lengths depend on the longest sequence of a batch."""


def _read(given: Fields, whole: Fields) -> BackboneConfig:
    fields = given.with_defaults(_DEFAULTS)
    fields.require("hidden_act", "silu", "our MLP is SwiGLU")
    fields.require("partial_rotary_factor", 1.0, "our rotary positions turn whole heads")
    for name in ("resid_pdrop", "embd_pdrop"):
        fields.require(name, 0, "our layers drop nothing out")
    _require_one_series(fields)
    window = fields.integer("sliding_window", most=MAX_POSITIONS) if fields.has("sliding_window") else 0
    return read_backbone(fields, whole, positions=4096, window=window)


def _require_one_series(fields: Fields) -> None:
    """Refuse wave lengths that change where a batch has a sequence of more than some length."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.within(name)
        for key in ("rope_type", "type"):
            if rope.data.get(key) in _LENGTHENED:
                raise rope.refusal(
                    key,
                    "default is required: such positions (longrope) depend on the longest sequence of a batch, and "
                    "ours on the token alone; take the model for 4k tokens, whose positions are plain",
                )


def _write(config: BackboneConfig) -> dict[str, Any]:
    require_equal_heads(config, "phi3")
    return {**write_backbone(config), "sliding_window": config.window or None}


def _block(config: BackboneConfig, number: int) -> list[Entry]:
    width, inner, shared = config.width, config.heads * config.head_size, config.groups * config.head_size
    ours, theirs = f"layers.{number}", f"model.layers.{number}"
    attention, mlp = f"{ours}.attention", f"{ours}.mlp"
    heads = {f"{attention}.query": inner, f"{attention}.key": shared, f"{attention}.value": shared}
    halves = {f"{mlp}.gate": config.mlp_width, f"{mlp}.up": config.mlp_width}
    return [
        vector(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", width),
        *stacked(heads, f"{theirs}.self_attn.qkv_proj", width, bias=False),
        *linear(f"{attention}.output", f"{theirs}.self_attn.o_proj", width, inner, bias=False),
        vector(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", width),
        *stacked(halves, f"{theirs}.mlp.gate_up_proj", width, bias=False),
        *linear(f"{mlp}.down", f"{theirs}.mlp.down_proj", width, config.mlp_width, bias=False),
    ]


def _entries(config: BackboneConfig) -> list[Entry]:
    def blocks() -> Iterator[Entry]:
        for number in range(config.layers):
            yield from _block(config, number)

    return backbone_entries(config, blocks())


PHI3: Final = Family(
    "phi3", BackboneConfig, _read, _entries, IGNORED, alone=Alone("Phi3ForCausalLM", _write, is_windowed_llama)
)
