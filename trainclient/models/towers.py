"""Towers of contrastive training, whole or as one stage of a pipeline: packed items in, a feature of each out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataserver.planning.job.fields import ModelSize
from trainclient.models.attention import Segments
from trainclient.models.backbone import stage_layers
from trainclient.models.backbone_block import BackboneBlock, BackboneConfig
from trainclient.models.checks import checked_index, require_shape
from trainclient.models.contrastive import Scale
from trainclient.models.contrastive_loss import ContrastiveLoss
from trainclient.models.encoder import ROTARY_BASE, EncoderBlock, EncoderConfig
from trainclient.models.layers import run_block
from trainclient.models.learned_positions import learned_positions
from trainclient.models.patches import normalise, patch_positions
from trainclient.models.rotary import Rotation, at_least_float32
from trainclient.upload import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTowerConfig(EncoderConfig):
    """Sizes of an image tower; `output_dim` is the width of its features."""

    loss: ContrastiveLoss = ContrastiveLoss.CLIP
    """What its features are for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTowerConfig(BackboneConfig):
    """Sizes of a text tower."""

    output_dim: int
    """Width of the tower's features."""
    loss: ContrastiveLoss = ContrastiveLoss.CLIP
    """What its features are for."""

    @property
    def size(self) -> ModelSize:
        """What operations and memory depend on: it has no head."""
        return ModelSize(self.layers, self.width, self.mlp_width, self.heads, self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class TowerOutput:
    """What a stage passes on: `hidden` to the next one; from the last one `features`, and `scale` where it has one."""

    hidden: Tensor | None = None
    """[rows, width]: what the last block returns."""
    features: Tensor | None = None
    """[items, output_dim], of length 1."""
    scale: Tensor | None = None
    """[2]: temperature and bias of the scores (`contrastive.Scale`)."""


class TowerStage(nn.Module, ABC):
    """Some consecutive layers of a tower; parameters have the names of the whole one (`BackboneStage`)."""

    beside_adapters: ClassVar[tuple[str, ...]] = ("project.", "scale.")
    """Beginnings of the names of what is trained whole where blocks have adapters (`lora.adapt`)."""

    def __init__(
        self,
        config: ImageTowerConfig | TextTowerConfig,
        stage: int = 0,
        num_stages: int = 1,
        *,
        has_scale: bool = False,
        checkpoint: bool = False,
    ) -> None:
        """Make a stage; the last one of one tower of a job has the scale of all."""
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        numbers = stage_layers(config.layers, stage, num_stages)
        self.layers = nn.ModuleDict({str(number): self._block() for number in numbers})
        if self.is_last:
            self.norm = self._norm()
            self.project = nn.Linear(config.width, config.output_dim, bias=False)
            self.scale = Scale(config.loss) if has_scale else None

    def forward(
        self, content: Tensor | None, coordinates: Tensor, offsets: Tensor, hidden: Tensor | None
    ) -> TowerOutput:
        """Run the stage.

        Args:
            content: of the items, for the first stage: patches, or token ids.
            coordinates: the grid of each image, or the position of each token. Better left on the CPU, as is the next.
            offsets: integers [items + 1], first row of each item and the end.
            hidden: [rows, width] from the stage before.

        Raises:
            ValueError: the tensors do not agree with each other or with the config.
        """
        if self.is_first == (hidden is not None) or self.is_first == (content is None):
            raise ValueError("the first stage of a tower takes what its items hold, and all others hidden states")
        rows, device = hidden if content is None else content, next(self.layers.parameters()).device
        if rows is None:
            raise ValueError("a stage of a tower got neither items nor hidden states")
        segments = Segments.from_offsets("offsets", offsets, len(rows), device)
        x = rows if content is None else self._embed(content, coordinates, segments)
        rotation = self._rotation(coordinates, segments, x)
        for layer in self.layers.values():
            x = run_block(layer, x, segments, rotation, checkpoint=self.checkpoint)
        if not self.is_last:
            return TowerOutput(x)
        pooled: Tensor = self.project(self._pool(self.norm(x), segments))
        features = F.normalize(pooled.to(at_least_float32(pooled.dtype)), dim=1).to(pooled.dtype)
        return TowerOutput(features=features, scale=None if self.scale is None else self.scale())

    @abstractmethod
    def _block(self) -> nn.Module:
        """Make one layer of the tower."""

    @abstractmethod
    def _norm(self) -> nn.Module:
        """What follows the last one."""

    @abstractmethod
    def _embed(self, content: Tensor, coordinates: Tensor, segments: Segments) -> Tensor:
        """The rows [rows, width] that enter the first one."""

    @abstractmethod
    def _rotation(self, coordinates: Tensor, segments: Segments, x: Tensor) -> Rotation | None:
        """Where rows lie; None where the rows that enter say so."""

    @abstractmethod
    def _pool(self, x: Tensor, segments: Segments) -> Tensor:
        """[rows, width] -> [items, width]."""


IN_ENCODER: Final = {f"norm.{part}": f"merger_norm.{part}" for part in ("weight", "bias")}
"""Parameters of an image tower that the encoder calls otherwise."""


class ImageTower(TowerStage):
    """Blocks of the encoder; the feature of an image is projected from the mean of its patches.

    Positions are rotary or learned, as those of the encoder.
    """

    config: ImageTowerConfig

    def __init__(self, config: ImageTowerConfig, stage: int = 0, num_stages: int = 1, **options: bool) -> None:
        for name in ("class_token", "window", "deepstack", "rotary", "rms_norms"):
            if getattr(config, name):
                raise ValueError(f"an image tower has no {name}; leave it out")
        super().__init__(config, stage, num_stages, **options)
        if self.is_first:
            self.patch_embed = config.patch_embedding()
            if config.position_grid:
                self.position_embed = nn.Embedding(config.position_grid**2, config.width)

    def _block(self) -> nn.Module:
        return EncoderBlock(self.config)

    def _norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.width, eps=self.config.norm_eps)

    def _embed(self, content: Tensor, coordinates: Tensor, segments: Segments) -> Tensor:
        weight, config = self.patch_embed.weight, self.config
        x: Tensor = self.patch_embed(normalise(content.to(weight.device), config.patch, weight.dtype, config.pixels))
        if not config.position_grid:
            return x
        positions = patch_positions(coordinates, segments, config.merge, x.device)
        learned, scaling = self.position_embed.weight, config.position_scaling or "bicubic"
        return x + learned_positions(learned, config.position_grid, coordinates, segments, positions, scaling)

    def _rotation(self, coordinates: Tensor, segments: Segments, x: Tensor) -> Rotation | None:
        if self.config.position_grid:
            return None
        positions = patch_positions(coordinates, segments, self.config.merge, x.device)
        return Rotation.of(positions, self.config.width // self.config.heads, ROTARY_BASE, x.dtype)

    def _pool(self, x: Tensor, segments: Segments) -> Tensor:
        precise, lengths = x.to(at_least_float32(x.dtype)), segments.offsets.diff().to(torch.int64)
        return torch.segment_reduce(precise, "mean", lengths=lengths).to(x.dtype)


class TextTower(TowerStage):
    """Blocks of the backbone; the feature of a text is projected from its last token, EOS, which sees all of it."""

    config: TextTowerConfig

    def __init__(self, config: TextTowerConfig, stage: int = 0, num_stages: int = 1, **options: bool) -> None:
        super().__init__(config, stage, num_stages, **options)
        if self.is_first:
            self.embed = nn.Embedding(config.vocab_size, config.width)

    def _block(self) -> nn.Module:
        return BackboneBlock(self.config)

    def _norm(self) -> nn.Module:
        return nn.RMSNorm(self.config.width, eps=self.config.norm_eps)

    def _embed(self, content: Tensor, coordinates: Tensor, segments: Segments) -> Tensor:
        del coordinates, segments
        index = checked_index("token_ids", content, self.config.vocab_size, self.embed.weight.device)
        return cast(Tensor, self.embed(index))

    def _rotation(self, coordinates: Tensor, segments: Segments, x: Tensor) -> Rotation:
        del segments
        require_shape("position_ids", coordinates, len(x))
        config, positions = self.config, upload(coordinates, x.device)[:, None]
        return Rotation.of(positions, config.head_size, config.rotary_base, x.dtype, config.rotary_scaling)

    def _pool(self, x: Tensor, segments: Segments) -> Tensor:
        return x.index_select(0, segments.offsets[1:].to(torch.int64) - 1)
