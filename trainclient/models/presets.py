"""Sizes of encoders, backbones, generators and towers, by the names of presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dataserver.planning.job.fields import entry_named
from trainclient.models.audio_encoder import AudioEncoderConfig
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.generator import GeneratorConfig


@dataclass(frozen=True, slots=True)
class ImageModuleSize:
    """A size of an encoder, of images or audio, or of a generator."""

    layers: int
    width: int
    heads: int
    mlp_width: int


@dataclass(frozen=True, slots=True)
class BackboneSize:
    """A size of a backbone."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    groups: int
    rotary_base: float = 500_000.0


ENCODERS: Final[Mapping[str, ImageModuleSize]] = MappingProxyType(
    {
        "tiny": ImageModuleSize(layers=2, width=64, heads=4, mlp_width=256),
        # ViT-Huge, arXiv 2010.11929, table 1: 0.63B.
        "vit-h": ImageModuleSize(layers=32, width=1280, heads=16, mlp_width=5120),
    }
)
AUDIO_ENCODERS: Final[Mapping[str, ImageModuleSize]] = MappingProxyType(
    {
        "tiny": ImageModuleSize(layers=2, width=64, heads=4, mlp_width=256),
        # Whisper's encoder, arXiv 2212.04356, table 1; also Qwen2-Audio's.
        "whisper-large": ImageModuleSize(layers=32, width=1280, heads=20, mlp_width=5120),
    }
)
# DistTrain (arXiv 2408.04275), table 2.
BACKBONES: Final[Mapping[str, BackboneSize]] = MappingProxyType(
    {
        "tiny": BackboneSize(layers=4, width=64, mlp_width=192, heads=4, groups=2),
        "llama3-7b": BackboneSize(layers=32, width=4096, mlp_width=11008, heads=32, groups=32),
        "llama3-13b": BackboneSize(layers=40, width=5120, mlp_width=13824, heads=40, groups=40),
        "llama3-70b": BackboneSize(layers=80, width=8192, mlp_width=28672, heads=64, groups=8),
    }
)
GENERATORS: Final[Mapping[str, ImageModuleSize]] = MappingProxyType(
    {
        "tiny": ImageModuleSize(layers=2, width=64, heads=4, mlp_width=256),
        "dit-1b": ImageModuleSize(layers=26, width=1536, heads=24, mlp_width=6144),
    }
)


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
    return BackboneConfig(s.layers, s.width, s.mlp_width, s.heads, s.groups, s.rotary_base, vocab_size, query_tokens)


def generator_config(name: str, patch: int, merge: int, condition_dim: int) -> GeneratorConfig:
    """Config of a named generator; ValueError for an unknown name."""
    size = entry_named("generator", GENERATORS, name)
    return GeneratorConfig(size.layers, size.width, size.heads, size.mlp_width, patch, merge, condition_dim)
