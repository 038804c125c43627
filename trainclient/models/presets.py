"""Named sizes of modules, and the closed form of their parameter counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar

import torch
from torch import nn

from trainclient.models.backbone import BackboneConfig, BackboneStage
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import TIME_FEATURES, GeneratorConfig, ImageGenerator
from trainclient.models.parameters import initialise

Size = TypeVar("Size")


@dataclass(frozen=True, slots=True)
class ImageModuleSize:
    """A size of an encoder or a generator."""

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


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a module's parameters live."""

    device: str = "cpu"
    """Any torch device; on "meta" parameters have no memory and no values, for counting and planning."""
    dtype: torch.dtype = torch.float32
    checkpoint: bool = False
    """Keep only each block's input and compute the block again in the backward pass."""


CPU: Final = Placement()
ENCODERS: Final[Mapping[str, ImageModuleSize]] = MappingProxyType(
    {
        "tiny": ImageModuleSize(layers=2, width=64, heads=4, mlp_width=256),
        # ViT-Huge, arXiv 2010.11929, table 1: 0.63B.
        "vit-h": ImageModuleSize(layers=32, width=1280, heads=16, mlp_width=5120),
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
    size = _preset("encoder", ENCODERS, name)
    return EncoderConfig(size.layers, size.width, size.heads, size.mlp_width, patch, merge, output_dim)


def backbone_config(name: str, vocab_size: int, query_tokens: int) -> BackboneConfig:
    """Config of a named backbone; ValueError for an unknown name."""
    s = _preset("backbone", BACKBONES, name)
    return BackboneConfig(s.layers, s.width, s.mlp_width, s.heads, s.groups, s.rotary_base, vocab_size, query_tokens)


def generator_config(name: str, patch: int, merge: int, condition_dim: int) -> GeneratorConfig:
    """Config of a named generator; ValueError for an unknown name."""
    size = _preset("generator", GENERATORS, name)
    return GeneratorConfig(size.layers, size.width, size.heads, size.mlp_width, patch, merge, condition_dim)


def build_encoder(
    name: str, patch: int, merge: int, output_dim: int, *, seed: int, prefix: str, placement: Placement = CPU
) -> ImageEncoder:
    """A named encoder with its initial values.

    Args:
        name: a key of `ENCODERS`.
        patch: side of a patch in pixels.
        merge: merge x merge patches become one embedding.
        output_dim: width of the backbone.
        seed: the job's seed.
        prefix: the module's name in the job (see `parameters.initialise`).
        placement: where and how its parameters live.

    Raises:
        ValueError: unknown name.
    """
    config = encoder_config(name, patch, merge, output_dim)
    with torch.device("meta"):
        module = ImageEncoder(config, checkpoint=placement.checkpoint)
    _place(module, seed, prefix, placement)
    return module


def build_backbone(
    name: str,
    vocab_size: int,
    query_tokens: int,
    stage: int = 0,
    num_stages: int = 1,
    *,
    seed: int,
    prefix: str,
    placement: Placement = CPU,
) -> BackboneStage:
    """A stage of a named backbone with its initial values, which do not depend on the number of stages.

    Args:
        name: a key of `BACKBONES`.
        vocab_size: token ids, the special ones included.
        query_tokens: learned queries for each generated image; 0 where the job generates none.
        stage: pipeline stage, in [0, num_stages).
        num_stages: the backbone's pp.
        seed: the job's seed.
        prefix: the module's name in the job.
        placement: where and how its parameters live.

    Raises:
        ValueError: unknown name, or a stage that cannot be.
    """
    config = backbone_config(name, vocab_size, query_tokens)
    with torch.device("meta"):
        module = BackboneStage(config, stage, num_stages, checkpoint=placement.checkpoint)
    _place(module, seed, prefix, placement)
    return module


def build_generator(
    name: str, patch: int, merge: int, condition_dim: int, *, seed: int, prefix: str, placement: Placement = CPU
) -> ImageGenerator:
    """A named generator with its initial values.

    Args:
        name: a key of `GENERATORS`.
        patch: side of a patch in pixels.
        merge: side of the blocks in which the patches of a target stand.
        condition_dim: width of the backbone.
        seed: the job's seed.
        prefix: the module's name in the job.
        placement: where and how its parameters live.

    Raises:
        ValueError: unknown name.
    """
    config = generator_config(name, patch, merge, condition_dim)
    with torch.device("meta"):
        module = ImageGenerator(config, checkpoint=placement.checkpoint)
    _place(module, seed, prefix, placement)
    return module


def num_parameters(config: EncoderConfig | BackboneConfig | GeneratorConfig) -> int:
    """Parameters of a whole module, from its config alone."""
    if isinstance(config, EncoderConfig):
        return encoder_trunk_parameters(config) + _merger_parameters(config)
    if isinstance(config, BackboneConfig):
        return _backbone_parameters(config)
    return _generator_parameters(config)


def encoder_trunk_parameters(config: EncoderConfig) -> int:
    """Parameters of an encoder without the merger that fits it to the backbone: what a paper's ViT size counts."""
    width = config.width
    block = _linear(width, 4 * width) + _mlp(width, config.mlp_width, width) + 4 * width
    return _linear(config.patch**2 * 3, width) + config.layers * block


def _merger_parameters(config: EncoderConfig) -> int:
    merged = config.width * config.merge**2
    return 2 * config.width + _mlp(merged, merged, config.output_dim)


def _backbone_parameters(config: BackboneConfig) -> int:
    width, key_width = config.width, config.width // config.heads * config.groups
    block = 2 * width * (width + key_width) + 3 * width * config.mlp_width + 2 * width
    return config.layers * block + (2 * config.vocab_size + config.query_tokens + 1) * width


def _generator_parameters(config: GeneratorConfig) -> int:
    width = config.width
    block = 2 * _linear(width, 4 * width) + _mlp(width, config.mlp_width, width) + 6 * width
    ends = _linear(config.patch_dim, width) + _linear(width, config.patch_dim) + _linear(config.condition_dim, width)
    time = _linear(TIME_FEATURES, width) + _linear(width, 9 * width)
    return config.layers * block + ends + time


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def _mlp(inputs: int, hidden: int, outputs: int) -> int:
    return _linear(inputs, hidden) + _linear(hidden, outputs)


def _preset(kind: str, sizes: Mapping[str, Size], name: str) -> Size:
    if name not in sizes:
        raise ValueError(f"there is no {kind} named {name!r}; choose one of {', '.join(sorted(sizes))}")
    return sizes[name]


def _place(module: nn.Module, seed: int, prefix: str, placement: Placement) -> None:
    module.to(placement.dtype)
    if placement.device != "meta":
        module.to_empty(device=placement.device)
        initialise(module, seed, prefix)
