"""Conditional diffusion transformer: backbone conditions in, patches of a picture out."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataserver.planning.job.fields import ModelSize
from trainclient.models.attention import Segments
from trainclient.models.checks import require_shape
from trainclient.models.layers import (
    MODULATION_STD,
    CrossAttention,
    Mlp,
    Modulation,
    SelfAttention,
    require_heads,
    run_block,
)
from trainclient.models.patches import normalise, patch_positions, to_pixels
from trainclient.models.rotary import Rotation, at_least_float32
from trainclient.upload import upload

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-6
TIME_FEATURES = 256
TIME_SCALE = 1000.0
MAX_PERIOD = 10_000.0


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """Sizes of a generator of images."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    patch: int
    """Side of a patch in pixels."""
    merge: int
    """Side of the blocks in which the patches of a target stand (the stream's `merge`)."""
    condition_dim: int
    """Width of the backbone, which gives the conditions."""

    def __post_init__(self) -> None:
        require_heads("a generator", self.width, self.heads, self.heads, axes=2)

    @property
    def size(self) -> ModelSize:
        """What operations and memory depend on."""
        return ModelSize(self.layers, self.width, self.mlp_width, self.heads, self.heads)

    @property
    def patch_dim(self) -> int:
        """Number of values of one patch."""
        return self.patch**2 * 3


@dataclass(frozen=True, slots=True, eq=False)
class _Scene:
    """What every block needs to know about the images of a call."""

    segments: Segments
    rotation: Rotation
    conditions: Tensor
    condition_segments: Segments
    modulation: Tensor
    image_of_row: Tensor


class GeneratorBlock(nn.Module):
    """Self attention, attention to the conditions, and an MLP, modulated by the time.

    The modulation is shared between blocks but for a table (PixArt-alpha, arXiv 2310.00426, section 2.3). It scales and
    gates by one plus itself, and starts small, not at zero: a fresh generator already sends gradients to the backbone.
    """

    initial_std = MODULATION_STD

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        width = config.width
        self.modulation_table = nn.Parameter(torch.empty(6, width))
        self.attention = SelfAttention(width, config.heads, config.heads, bias=True, causal=False)
        self.cross_attention = CrossAttention(width, config.heads)
        self.mlp = Mlp(width, config.mlp_width)

    def forward(self, x: Tensor, scene: _Scene) -> Tensor:
        """[P, width] -> [P, width]."""
        modulation = (scene.modulation + self.modulation_table).index_select(0, scene.image_of_row)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.unbind(1)
        attended = self.attention(_norm(x) * (1 + scale) + shift, scene.segments, scene.rotation)
        x = x + (1 + gate) * attended
        x = x + self.cross_attention(_norm(x), scene.segments, scene.conditions, scene.condition_segments)
        return x + (1 + mlp_gate) * cast(Tensor, self.mlp(_norm(x) * (1 + mlp_scale) + mlp_shift))


class ImageGenerator(nn.Module):
    """Diffusion transformer (arXiv 2212.09748) on packed patches, trained by flow matching (arXiv 2210.02747).

    A target x and noise e give x_t = (1 - t) x + t e; the network predicts the velocity e - x from x_t, t and the
    conditions.
    """

    def __init__(self, config: GeneratorConfig, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        width = config.width
        self.patch_embed = nn.Linear(config.patch_dim, width)
        self.condition_embed = nn.Linear(config.condition_dim, width)
        self.time_up = nn.Linear(TIME_FEATURES, width)
        self.time_down = nn.Linear(width, width)
        self.modulation = Modulation(width, 6 * width)
        self.layers = nn.ModuleList(GeneratorBlock(config) for _ in range(config.layers))
        self.output_modulation = Modulation(width, 2 * width)
        self.output = nn.Linear(width, config.patch_dim)

    def forward(
        self,
        patches: Tensor,
        grid: Tensor,
        cu_patches: Tensor,
        conditions: Tensor,
        condition_offsets: Tensor,
        noise: Tensor,
        time: Tensor,
        loss_mask: Tensor,
    ) -> Tensor:
        """The loss of one microbatch.

        Args:
            patches: uint8 [P, patch_dim], the targets, merge-block-major inside each image; P may be 0.
            grid: integers [images, 2], rows and columns in patches. Better left on the CPU, as are all offsets.
            cu_patches: integers [images + 1].
            conditions: [Q, condition_dim] from the backbone.
            condition_offsets: integers [images + 1], the rows of `conditions` of each image.
            noise: [P, patch_dim], standard normal.
            time: [images], in (0, 1).
            loss_mask: bool [images]; images that are False add exactly nothing.

        Returns:
            Scalar, at least float32: the sum over the patches of masked-in images of the mean squared error of a patch.

        Raises:
            ValueError: the tensors do not agree with each other or with the config.
        """
        config, weight = self.config, self.patch_embed.weight
        target = normalise(patches.to(weight.device), config.patch, weight.dtype)
        require_shape("noise", noise, len(target), config.patch_dim)
        require_shape("time", time, len(grid))
        require_shape("loss_mask", loss_mask, len(grid))
        if loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask has dtype {loss_mask.dtype}; bool is required")
        noise = noise.to(weight)
        segments = Segments.from_offsets("cu_patches", cu_patches, len(target), weight.device)
        image_of_row = segments.row_segments()
        t = time.to(weight)[image_of_row, None]
        velocity = self.velocity((1 - t) * target + t * noise, grid, cu_patches, conditions, condition_offsets, time)
        error = (velocity - (noise - target)).to(at_least_float32(weight.dtype)).square().mean(1)
        counted = upload(loss_mask, weight.device)[image_of_row]
        return error.masked_fill(~counted, 0).sum()

    def velocity(
        self,
        x: Tensor,
        grid: Tensor,
        cu_patches: Tensor,
        conditions: Tensor,
        condition_offsets: Tensor,
        time: Tensor,
    ) -> Tensor:
        """The predicted velocity of noisy patches x [P, patch_dim] at `time` [images]: [P, patch_dim]."""
        config, weight = self.config, self.patch_embed.weight
        require_shape("conditions", conditions, -1, config.condition_dim)
        segments = Segments.from_offsets("cu_patches", cu_patches, len(x), weight.device)
        positions = patch_positions(grid, segments, config.merge, weight.device)
        embedded_time = self._embed_time(time.to(weight.device))
        scene = _Scene(
            segments=segments,
            rotation=Rotation.of(positions, config.width // config.heads, ROTARY_BASE, weight.dtype),
            conditions=_norm(self.condition_embed(conditions.to(weight))),
            condition_segments=Segments.from_offsets(
                "condition_offsets", condition_offsets, len(conditions), weight.device
            ),
            modulation=self.modulation(embedded_time).unflatten(-1, (6, config.width)),
            image_of_row=segments.row_segments(),
        )
        # Rotary positions alone are relative: in pure noise nothing would tell a patch where in the picture it stands.
        h: Tensor = self.patch_embed(x) + _sinusoids(positions, config.width // 4).flatten(1).to(weight.dtype)
        for layer in self.layers:
            h = run_block(layer, h, scene, checkpoint=self.checkpoint)
        shift, scale = self.output_modulation(embedded_time)[scene.image_of_row].chunk(2, dim=-1)
        return cast(Tensor, self.output(_norm(h) * (1 + scale) + shift))

    @torch.no_grad()
    def sample(
        self,
        grid: Tensor,
        cu_patches: Tensor,
        conditions: Tensor,
        condition_offsets: Tensor,
        noise: Tensor,
        steps: int,
    ) -> Tensor:
        """Draw pictures by Euler steps from noise (t = 1) to images (t = 0).

        Args:
            grid: integers [images, 2].
            cu_patches: integers [images + 1].
            conditions: [Q, condition_dim].
            condition_offsets: integers [images + 1].
            noise: [P, patch_dim], standard normal.
            steps: Euler steps, at least 1.

        Returns:
            uint8 [P, patch_dim]; `patches.assemble_image` makes a picture of each image's rows.
        """
        if steps < 1:
            raise ValueError(f"steps is {steps}; at least 1 is required")
        require_shape("noise", noise, -1, self.config.patch_dim)
        x = noise.to(self.patch_embed.weight)
        for step in range(steps):
            time = x.new_full((len(grid),), 1 - step / steps)
            x = x - self.velocity(x, grid, cu_patches, conditions, condition_offsets, time) / steps
        return to_pixels(x)

    def _embed_time(self, time: Tensor) -> Tensor:
        """Sinusoidal features of the time, then an MLP: [images] -> SiLU-activated [images, width]."""
        features = _sinusoids(time * TIME_SCALE, TIME_FEATURES // 2).to(self.time_up.weight.dtype)
        return F.silu(self.time_down(F.silu(self.time_up(features))))


def _sinusoids(values: Tensor, frequencies: int) -> Tensor:
    """Cosines and sines of [...] at falling frequencies: float64 [..., 2 * frequencies]."""
    exponent = torch.arange(frequencies, dtype=torch.float64, device=values.device) / frequencies
    angles = values.to(torch.float64)[..., None] * MAX_PERIOD**-exponent
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
