"""Sizes of encoders, backbones, generators and towers, by the names of presets; the planner knows the same sizes."""

from typing import Final

from dataserver.planning.job.fields import MODELS, entry_named
from trainclient.models.audio_encoder import AudioEncoderConfig
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.generator import GeneratorConfig

AUDIO_ENCODERS: Final = {name: MODELS["encoder"][name] for name in ("tiny", "whisper-large")}
ENCODERS: Final = {name: MODELS["encoder"][name] for name in ("tiny", "vit-h")}
BACKBONES: Final = MODELS["backbone"]
ROTARY_BASE: Final = 500_000.0
"""Of Llama 3."""


def encoder_config(name: str, patch: int, merge: int, output_dim: int) -> EncoderConfig:
    """Config of a named encoder; ValueError for an unknown name."""
    size = entry_named("encoder", ENCODERS, name)
    return EncoderConfig(size.layers, size.width, size.heads, size.mlp_width, patch, merge, output_dim)


def audio_encoder_config(name: str, bins: int, merge: int, output_dim: int) -> AudioEncoderConfig:
    """Config of a named encoder of audio; ValueError for an unknown name."""
    size = entry_named("encoder of audio", AUDIO_ENCODERS, name)
    return AudioEncoderConfig(size.layers, size.width, size.heads, size.mlp_width, bins, merge, output_dim)


def backbone_config(name: str, vocab_size: int, query_tokens: int) -> BackboneConfig:
    """Config of a named backbone; ValueError for an unknown name."""
    s = entry_named("backbone", BACKBONES, name)
    return BackboneConfig(s.layers, s.width, s.mlp_width, s.heads, s.groups, ROTARY_BASE, vocab_size, query_tokens)


def generator_config(name: str, patch: int, merge: int, condition_dim: int) -> GeneratorConfig:
    """Config of a named generator; ValueError for an unknown name."""
    size = entry_named("generator", MODELS["generator"], name)
    return GeneratorConfig(size.layers, size.width, size.heads, size.mlp_width, patch, merge, condition_dim)
