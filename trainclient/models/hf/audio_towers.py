"""Audio towers: Whisper's encoder, and Qwen2-Audio's, which is the same with the mean of two positions and a projector.

Whisper's has no projector: one begins untrained, and `merge` and `output_dim` are free to choose.
"""

from typing import Any, Final

from trainclient.models.audio_encoder import AudioEncoderConfig
from trainclient.models.hf.fields import MAX_LAYERS, Fields
from trainclient.models.hf.mapping import PLAIN, Alone, Entry, Family, linear, norm, table, vector
from trainclient.models.hf.towers import ACTIVATION_NAMES, ACTIVATIONS

_QWEN_MERGE: Final = 2
"""Positions that Qwen2-Audio's pooling joins."""


def _read_tower(fields: Fields, bins: int, **changes: Any) -> AudioEncoderConfig:
    for name in ("attention_dropout", "activation_dropout", "dropout", "encoder_layerdrop"):
        fields.require(name, 0, "our layers drop nothing out")
    width, heads = fields.integer("d_model", 1280), fields.integer("encoder_attention_heads", 20)
    if width % heads:
        raise fields.refusal("encoder_attention_heads", f"a divisor of d_model, {width}, is required")
    found: dict[str, Any] = {
        "layers": fields.integer("encoder_layers", 32, MAX_LAYERS),
        "width": width,
        "heads": heads,
        "mlp_width": fields.integer("encoder_ffn_dim", 5120),
        "bins": fields.integer("num_mel_bins", bins, 256),
        "merge": 1,
        "output_dim": width,
        "positions": fields.integer("max_source_positions", 1500, 1 << 16),
        "activation": fields.choice("activation_function", ACTIVATIONS, "gelu"),
    }
    return AudioEncoderConfig(**found | changes)


def _read_whisper(fields: Fields, whole: Fields) -> AudioEncoderConfig:
    del whole
    return _read_tower(fields, 80)


def _read_qwen(fields: Fields, whole: Fields) -> AudioEncoderConfig:
    text = whole.within("text_config")
    return _read_tower(fields, 128, merge=_QWEN_MERGE, output_dim=text.integer("hidden_size", 4096))


def _tower_entries(config: AudioEncoderConfig) -> list[Entry]:
    width = config.width
    found = [
        Entry({"conv_in.weight": width}, "conv1.weight", (width, config.bins, 3)),
        vector("conv_in.bias", "conv1.bias", width),
        Entry({"conv_down.weight": width}, "conv2.weight", (width, width, 3)),
        vector("conv_down.bias", "conv2.bias", width),
        table("position_embed.weight", "embed_positions.weight", config.positions, width),
        *norm("output_norm", "layer_norm", width),
    ]
    for number in range(config.layers):
        layer = f"layers.{number}"
        found += [
            *norm(f"{layer}.attention_norm", f"{layer}.self_attn_layer_norm", width),
            *linear(f"{layer}.attention.query", f"{layer}.self_attn.q_proj", width, width, bias=True),
            *linear(f"{layer}.attention.key", f"{layer}.self_attn.k_proj", width, width, bias=False),
            *linear(f"{layer}.attention.value", f"{layer}.self_attn.v_proj", width, width, bias=True),
            *linear(f"{layer}.attention.output", f"{layer}.self_attn.out_proj", width, width, bias=True),
            *norm(f"{layer}.mlp_norm", f"{layer}.final_layer_norm", width),
            *linear(f"{layer}.mlp.up", f"{layer}.fc1", config.mlp_width, width, bias=True),
            *linear(f"{layer}.mlp.down", f"{layer}.fc2", width, config.mlp_width, bias=True),
        ]
    return found


def _qwen_entries(config: AudioEncoderConfig) -> list[Entry]:
    projector = linear("projector", "multi_modal_projector.linear", config.output_dim, config.width, bias=True)
    return [*_tower_entries(config), *projector]


def _write_whisper(config: AudioEncoderConfig) -> dict[str, Any]:
    return {
        "activation_function": ACTIVATION_NAMES[config.activation],
        "d_model": config.width,
        "encoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.mlp_width,
        "encoder_layers": config.layers,
        "max_source_positions": config.positions,
        "num_mel_bins": config.bins,
    }


WHISPER: Final = Family(
    "whisper",
    AudioEncoderConfig,
    _read_whisper,
    _tower_entries,
    r"(model\.)?(decoder|encoder)\..*|proj_out\..*",
    (PLAIN, {"": "model.encoder."}, {"": "encoder."}),
    alone=Alone("WhisperEncoder", _write_whisper, lambda config: True),  # noqa: ARG005
)
QWEN2_AUDIO: Final = Family(
    "qwen2_audio",
    AudioEncoderConfig,
    _read_qwen,
    _qwen_entries,
    r"(?!)",
    (
        {"multi_modal_projector.": "multi_modal_projector.", "": "audio_tower."},
        {"multi_modal_projector.": "model.multi_modal_projector.", "": "model.audio_tower."},
    ),
    "audio_config",
)
