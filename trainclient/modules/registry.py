"""The modules that come with the trainer, by kind.

A module of one's own is named by the configuration instead (`own`).
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from dataserver.planning.job.fields import Modality, ModuleKind, ModuleSpec, TileChoice
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.stream.item_sizes import audio_sizing
from trainclient.exchange.message_header import Kind
from trainclient.models.audio_encoder import AudioEncoder, AudioEncoderConfig
from trainclient.models.backbone import BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.models.presets import audio_encoder_config, backbone_config, encoder_config, generator_config
from trainclient.models.towers import IN_ENCODER, ImageTower, ImageTowerConfig, TextTower, TextTowerConfig, TowerStage
from trainclient.models.video_encoder import VideoEncoder
from trainclient.modules.audio_encoder import EncoderOfAudio
from trainclient.modules.backbone import Backbone
from trainclient.modules.encoder import Encoder
from trainclient.modules.generator import Generator
from trainclient.modules.pretrained import (
    Pretrained,
    Sizes,
    pretrained_audio,
    pretrained_backbone,
    pretrained_encoder,
    pretrained_image_tower,
    pretrained_text_tower,
    pretrained_video,
    sizes_of,
    spans_two_frames,
)
from trainclient.modules.protocol import Site, TrainedModule
from trainclient.modules.tower import TowerOfImages, TowerOfTexts
from trainclient.modules.video_encoder import EncoderOfVideos
from trainclient.orchestrate.memory import ENCODER_BLOCK, GATED_BLOCK, GENERATOR_BLOCK, Block


@dataclass(frozen=True, slots=True)
class Family:
    """What the trainer knows of a kind of module."""

    section: str
    """Section of a configuration that says what all such modules are."""
    rows: Kind
    """What it hands to other modules."""
    block: Block
    """What its blocks keep of a row."""
    sizes: Callable[[str, JobSpec, int], Sizes]
    """Sizes of a preset in a job, given the backbone's width (a backbone's own do not depend on it), or the width of
    features."""
    make: Callable[[Site, Any], TrainedModule]
    """The module of these sizes."""
    begins_as: Pretrained | None = None
    """How it can begin as a checkpoint."""
    staged: bool = False
    """Whether it may be cut into stages, and so cannot be of one's own."""
    in_whole: bool = False
    """Whether it is a part of released models that are whole: they have at most one of a kind."""
    spine: bool = False
    """Whether rows of all others have its width, and ranks share its sequences."""
    adaptable: bool = True
    """Whether it can learn adapters beside its weights."""


def family_of(module: ModuleSpec) -> Family:
    """What the trainer knows of a module."""
    return _FAMILIES[module.kind if module.modality is None else module.modality]


def rows_of(module: ModuleSpec) -> Kind:
    """What a module hands to others."""
    return family_of(module).rows


def exported_as(described: Mapping[str, Any]) -> Pretrained | None:
    """Say as what a module that a checkpoint describes (`Models.describe`) is exported: what can begin as it; None if
    nothing of ours can be read back."""
    if described.get("bins"):  # of audio
        return _FAMILIES[Modality.AUDIO].begins_as
    if described["kind"] == ModuleKind.TOWER:  # of images, with positions as SigLIP's
        return _IMAGE_TOWER if described.get("position_grid") else None
    return _FAMILIES[ModuleKind(described["kind"])].begins_as


def parts_of_whole(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Which modules of a checkpoint (`Models.describe`) are parts of a released model, by their kinds."""
    found: dict[str, list[str]] = {}
    for name, described in modules.items():
        kind = ModuleKind(described["kind"])
        if described.get("bins"):  # no released model that is whole has audio here
            continue
        if kind in _FAMILIES and _FAMILIES[kind].in_whole:
            found.setdefault(str(kind), []).append(name)
    return found


def own(reference: str, site: Site, options: Mapping[str, Any]) -> TrainedModule:
    """A module of the user's own.

    Args:
        reference: `package.module:Name` of a class or function that takes a Site and the options by name.
        site: where it is put.
        options: further arguments.

    Raises:
        ValueError: it cannot be imported, takes other options, or makes something else than a TrainedModule.
    """
    package, _, name = reference.partition(":")
    try:
        factory = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"module {site.module.name} is to be {reference!r}, which cannot be imported ({error}); give "
            "package.module:Class, and put its folder on PYTHONPATH"
        ) from None
    try:
        inspect.signature(factory).bind(site, **options)
    except TypeError as error:
        raise ValueError(
            f"module {site.module.name} is to be {reference!r}, which cannot be made of {list(options)} ({error}); "
            f"give modules.{site.module.name}.options that it takes"
        ) from None
    made = factory(site, **options)
    if not isinstance(made, TrainedModule):
        raise ValueError(
            f"module {site.module.name} is to be {reference!r}, which makes a {type(made).__name__}; a "
            "trainclient.modules.TrainedModule is required"
        )
    return made


def _of_patches(preset: str, job: JobSpec, width: int) -> EncoderConfig:
    """An encoder of a job's patches, images' or videos'."""
    return encoder_config(preset, job.stream.sizing.patch, job.stream.sizing.merge, width)


def _encoder_sizes(preset: str, job: JobSpec, width: int) -> Sizes:
    tiles = job.stream.sizing.tiles
    line_ends = tiles is not None and tiles.choice is TileChoice.PINPOINTS
    return replace(_of_patches(preset, job, width), line_ends=line_ends)


def _audio_sizes(preset: str, job: JobSpec, width: int) -> Sizes:
    audio = audio_sizing(job.stream.sizing)
    return audio_encoder_config(preset, audio.bins, audio.merge, width)


def _backbone_sizes(preset: str, job: JobSpec, width: int) -> Sizes:
    del width
    return backbone_config(preset, job.stream.tokenizer.vocab_size, _query_tokens(job))


def _pretrained_backbone(found: BackboneConfig, job: JobSpec, width: int) -> Sizes:
    """Its query tokens are new."""
    return replace(pretrained_backbone(found, job, width), query_tokens=_query_tokens(job))


def _query_tokens(job: JobSpec) -> int:
    """Learned query tokens of a job's backbone for each generated image."""
    return job.stream.generation.query_tokens if job.execution.of_kind(ModuleKind.GENERATOR) else 0


def _generator_sizes(preset: str, job: JobSpec, width: int) -> Sizes:
    sizing = job.stream.sizing
    return generator_config(preset, sizing.patch, sizing.merge, width)


def _encoder(site: Site, sizes: EncoderConfig) -> TrainedModule:
    tiled = site.job.stream.sizing.tiles is not None
    return Encoder(ImageEncoder(sizes, checkpoint=bool(site.module.recompute)), tiled=tiled)


def _audio_encoder(site: Site, sizes: AudioEncoderConfig) -> TrainedModule:
    return EncoderOfAudio(AudioEncoder(sizes, checkpoint=bool(site.module.recompute)))


def _backbone(site: Site, sizes: BackboneConfig) -> TrainedModule:
    return Backbone(BackboneStage(sizes, site.chunk, site.num_chunks, checkpoint=bool(site.module.recompute)))


def _generator(site: Site, sizes: GeneratorConfig) -> TrainedModule:
    return Generator(ImageGenerator(sizes, checkpoint=bool(site.module.recompute)))


def _image_tower_sizes(preset: str, job: JobSpec, width: int) -> Sizes:
    return ImageTowerConfig(**sizes_of(_of_patches(preset, job, width)))


def _text_tower_sizes(preset: str, job: JobSpec, width: int) -> Sizes:
    return TextTowerConfig(**sizes_of(backbone_config(preset, job.stream.tokenizer.vocab_size, 0)), output_dim=width)


def _tower(
    made: Callable[[TowerStage], TrainedModule], stage: type[TowerStage], site: Site, sizes: Any
) -> TrainedModule:
    has_scale = site.module.name == site.job.execution.modules[0].name
    recompute = bool(site.module.recompute)
    return made(stage(sizes, site.chunk, site.num_chunks, has_scale=has_scale, checkpoint=recompute))


def _video_sizes(preset: str, job: JobSpec, width: int) -> Sizes:
    return replace(_of_patches(preset, job, width), second_frame=spans_two_frames(job))


def _video_encoder(site: Site, sizes: EncoderConfig) -> TrainedModule:
    return EncoderOfVideos(VideoEncoder(sizes, checkpoint=bool(site.module.recompute)))


_ENCODER: Final = Pretrained(EncoderConfig, pretrained_encoder)
_AUDIO: Final = Pretrained(AudioEncoderConfig, pretrained_audio)
_VIDEO: Final = Pretrained(EncoderConfig, pretrained_video)
_BACKBONE: Final = Pretrained(BackboneConfig, _pretrained_backbone)
_IMAGE_TOWER: Final = Pretrained(EncoderConfig, pretrained_image_tower, IN_ENCODER)
_TEXT_TOWER: Final = Pretrained(BackboneConfig, pretrained_text_tower)

_FAMILIES: Final[Mapping[ModuleKind | Modality, Family]] = MappingProxyType(
    {
        ModuleKind.ENCODER: Family(
            "encoder", Kind.EMBEDDINGS, ENCODER_BLOCK, _encoder_sizes, _encoder, _ENCODER, in_whole=True
        ),
        ModuleKind.BACKBONE: Family(
            "backbone",
            Kind.CONDITIONS,
            GATED_BLOCK,
            _backbone_sizes,
            _backbone,
            _BACKBONE,
            staged=True,
            in_whole=True,
            spine=True,
        ),
        ModuleKind.GENERATOR: Family(
            "generator", Kind.CONDITIONS, GENERATOR_BLOCK, _generator_sizes, _generator, adaptable=False
        ),
        Modality.AUDIO: Family("encoder", Kind.EMBEDDINGS, ENCODER_BLOCK, _audio_sizes, _audio_encoder, _AUDIO),
        Modality.VIDEO: Family("encoder", Kind.EMBEDDINGS, ENCODER_BLOCK, _video_sizes, _video_encoder, _VIDEO),
        Modality.IMAGE: Family(
            "encoder",
            Kind.ACTIVATIONS,
            ENCODER_BLOCK,
            _image_tower_sizes,
            partial(_tower, TowerOfImages, ImageTower),
            _IMAGE_TOWER,
            staged=True,
        ),
        Modality.TEXT: Family(
            "backbone",
            Kind.ACTIVATIONS,
            GATED_BLOCK,
            _text_tower_sizes,
            partial(_tower, TowerOfTexts, TextTower),
            _TEXT_TOWER,
            staged=True,
        ),
    }
)
