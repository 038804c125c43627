"""ViT encoder: packed images of any size in, backbone embeddings out."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from trainclient.models.attention import Segments
from trainclient.models.layers import Mlp, Rotation, SelfAttention, require_heads, run_block
from trainclient.models.patches import normalise, patch_positions

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes of an encoder."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    patch: int
    """Side of a patch in pixels."""
    merge: int
    """merge x merge patches become one embedding."""
    output_dim: int
    """Width of the backbone."""

    def __post_init__(self) -> None:
        require_heads("an encoder", self.width, self.heads, self.heads, axes=2)


class EncoderBlock(nn.Module):
    """Pre-norm transformer block with attention inside each image."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.attention = SelfAttention(config.width, config.heads, config.heads, bias=True, causal=False)
        self.mlp_norm = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.mlp = Mlp(config.width, config.mlp_width)

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation) -> Tensor:
        """[P, width] -> [P, width]."""
        x = x + self.attention(self.attention_norm(x), segments, rotation)
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


class ImageEncoder(nn.Module):
    """Vision transformer (arXiv 2010.11929) on packed images, with 2-D rotary positions and Qwen2-VL's merger."""

    def __init__(self, config: EncoderConfig, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        merged = config.width * config.merge**2
        self.patch_embed = nn.Linear(config.patch**2 * 3, config.width)
        self.layers = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        self.merger_norm = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.merger = Mlp(merged, merged, config.output_dim)

    def forward(self, patches: Tensor, grid: Tensor, cu_patches: Tensor) -> Tensor:
        """Embed every block of merge x merge patches.

        Args:
            patches: uint8 [P, patch * patch * 3], merge-block-major inside each image; P may be 0.
            grid: integers [images, 2], rows and columns in patches. Better left on the CPU, as is the next.
            cu_patches: integers [images + 1].

        Returns:
            [P / merge^2, output_dim] in the module's dtype.

        Raises:
            ValueError: the tensors do not agree with each other or with the config.
        """
        config, weight = self.config, self.patch_embed.weight
        segments = Segments.from_offsets("cu_patches", cu_patches, patches.shape[0], weight.device)
        positions = patch_positions(grid, segments, config.merge, weight.device)
        x = self.patch_embed(normalise(patches.to(weight.device), config.patch, weight.dtype))
        rotation = Rotation.of(positions, config.width // config.heads, ROTARY_BASE, weight.dtype)
        for layer in self.layers:
            x = run_block(layer, x, segments, rotation, checkpoint=self.checkpoint)
        merged = self.merger_norm(x).view(-1, config.width * config.merge**2)
        return cast(Tensor, self.merger(merged))
