"""The models of a run: their sizes, and the one that this process holds."""

from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from dataserver.planning.job import JobSpec
from dataserver.planning.jobspec import ModuleKind
from trainclient.models.backbone import BackboneConfig, BackboneStage, stage_layers
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.models.parameters import initialise
from trainclient.models.presets import backbone_config, encoder_config, generator_config
from trainclient.parallel.topology import Place
from trainclient.training.config import BackboneModel, ImageModuleModel, TrainConfig

Sizes = TypeVar("Sizes", EncoderConfig, BackboneConfig, GeneratorConfig)


@dataclass(frozen=True, slots=True)
class ModelConfigs:
    """Sizes of the modules of a job."""

    encoder: EncoderConfig
    backbone: BackboneConfig
    generator: GeneratorConfig

    @classmethod
    def of(cls, config: TrainConfig, spec: JobSpec) -> "ModelConfigs":
        """The sizes that a configuration asks for, fitted to the job.

        Raises:
            ValueError: an unknown preset, sizes that do not fit each other, or more stages than layers.
        """
        stream, backbone_module = spec.stream, spec.execution.backbone
        queries = stream.generation.query_tokens if spec.execution.of_kind(ModuleKind.GENERATOR) else 0
        backbone = _replaced(
            backbone_config(config.backbone.preset, stream.tokenizer.vocab_size, queries), config.backbone
        )
        patch, merge = stream.sizing.patch, stream.sizing.merge
        stage_layers(backbone.layers, 0, backbone_module.pp)
        return cls(
            encoder=_replaced(encoder_config(config.encoder.preset, patch, merge, backbone.width), config.encoder),
            backbone=backbone,
            generator=_replaced(
                generator_config(config.generator.preset, patch, merge, backbone.width), config.generator
            ),
        )

    def describe_all(self, spec: JobSpec) -> dict[str, Any]:
        """The sizes of every module of a job as plain values: what a checkpoint must agree with."""
        by_kind: dict[ModuleKind, EncoderConfig | BackboneConfig | GeneratorConfig] = {
            ModuleKind.ENCODER: self.encoder,
            ModuleKind.BACKBONE: self.backbone,
            ModuleKind.GENERATOR: self.generator,
        }
        return {m.name: {"kind": str(m.kind), **asdict(by_kind[m.kind])} for m in spec.execution.modules}


def build_module(configs: ModelConfigs, place: Place, config: TrainConfig, device: torch.device) -> nn.Module:
    """The module, or the stage of it, that a process holds, with its initial values."""
    checkpoint = config.activation_checkpointing
    module: nn.Module
    with torch.device("meta"):
        if place.module.kind is ModuleKind.ENCODER:
            module = ImageEncoder(configs.encoder, checkpoint=checkpoint)
        elif place.module.kind is ModuleKind.GENERATOR:
            module = ImageGenerator(configs.generator, checkpoint=checkpoint)
        else:
            module = BackboneStage(configs.backbone, place.stage, place.module.pp, checkpoint=checkpoint)
    module.to(config.dtype.torch)
    module.to_empty(device=device)
    initialise(module, config.seed, place.module.name)
    return module


def _replaced(sizes: Sizes, model: ImageModuleModel | BackboneModel) -> Sizes:
    given = model.model_dump(exclude={"preset"}, exclude_none=True)
    return replace(sizes, **given)
