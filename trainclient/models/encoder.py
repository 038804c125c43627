"""ViT encoder: packed images of any size in, backbone embeddings out."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataserver.planning.job.fields import ModelSize
from trainclient.models.attention import Segments
from trainclient.models.layers import ACTIVATIONS, Mlp, Rotation, SelfAttention, require_heads, run_block
from trainclient.models.patches import PIXELS, normalise, patch_positions
from trainclient.upload import upload

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
    """Width of the backbone, which takes the embeddings."""
    norm_eps: float = NORM_EPS
    """Added to the variance in all norms."""
    activation: str = "gelu"
    """Activation of the blocks' MLPs: gelu, gelu_tanh or quick_gelu."""
    patch_bias: bool = True
    """Whether the embedding of patches has a bias."""
    pixels: str = "half"
    """How pixels are normalised: half (to [-1, 1]) or clip."""
    position_grid: int = 0
    """Side of a learned grid of positions, which is interpolated for images of other grids; 0: rotary positions."""
    class_token: bool = False
    """Whether a learned row stands before the patches of each image, and a norm before the first block, as in CLIP."""

    def __post_init__(self) -> None:
        require_heads("an encoder", self.width, self.heads, self.heads, axes=2)
        for name, known in (("activation", ACTIVATIONS), ("pixels", PIXELS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; one of {', '.join(known)} is required")
        if self.class_token and not self.position_grid:
            raise ValueError("class_token goes with learned positions; give position_grid as well")

    @property
    def size(self) -> ModelSize:
        """What operations and memory depend on."""
        return ModelSize(self.layers, self.width, self.mlp_width, self.heads, self.heads)


class EncoderBlock(nn.Module):
    """Pre-norm transformer block with attention inside each image."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = SelfAttention(config.width, config.heads, config.heads, bias=True, causal=False)
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config.width, config.mlp_width, activation=config.activation)

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation | None) -> Tensor:
        """[P, width] -> [P, width]."""
        x = x + self.attention(self.attention_norm(x), segments, rotation)
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


class ImageEncoder(nn.Module):
    """Vision transformer (arXiv 2010.11929) on packed images, with Qwen2-VL's merger.

    Positions are rotary in two dimensions (Qwen2-VL, arXiv 2409.12191) or learned (SigLIP, arXiv 2303.15343; CLIP,
    arXiv 2103.00020).
    """

    def __init__(self, config: EncoderConfig, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        merged = config.width * config.merge**2
        self.patch_embed = nn.Linear(config.patch**2 * 3, config.width, bias=config.patch_bias)
        if config.position_grid:
            self.position_embed = nn.Embedding(config.position_grid**2 + config.class_token, config.width)
        if config.class_token:
            self.class_embed = nn.Parameter(torch.empty(config.width))
            self.input_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.layers = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        self.merger_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
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
        config = self.config
        x = self.merger_norm(self.features(patches, grid, cu_patches))
        return cast(Tensor, self.merger(x.view(-1, config.width * config.merge**2)))

    def features(self, patches: Tensor, grid: Tensor, cu_patches: Tensor) -> Tensor:
        """What the last block makes of every patch, [P, width]; arguments and errors are those of `forward`."""
        config, weight = self.config, self.patch_embed.weight
        segments = Segments.from_offsets("cu_patches", cu_patches, patches.shape[0], weight.device)
        positions = patch_positions(grid, segments, config.merge, weight.device)
        x: Tensor = self.patch_embed(normalise(patches.to(weight.device), config.patch, weight.dtype, config.pixels))
        if not config.position_grid:
            rotation = Rotation.of(positions, config.width // config.heads, ROTARY_BASE, weight.dtype)
            return self._run(x, segments, rotation)
        learned = self.position_embed.weight[int(config.class_token) :]
        x = x + learned_positions(learned, config.position_grid, grid, segments, positions)
        if not config.class_token:
            return self._run(x, segments, None)
        offsets = cu_patches.cpu().to(torch.int64) + torch.arange(len(segments) + 1)
        is_patch = torch.ones(int(offsets[-1]), dtype=torch.bool).index_fill(0, offsets[:-1], False)
        rows = upload(is_patch.nonzero().squeeze(1), weight.device)
        first = self.class_embed + self.position_embed.weight[0]
        with_first = first.expand(len(is_patch), -1).index_copy(0, rows, x)
        whole = Segments.from_offsets("cu_patches", offsets, len(is_patch), weight.device)
        return self._run(self.input_norm(with_first), whole, None).index_select(0, rows)

    def _run(self, x: Tensor, segments: Segments, rotation: Rotation | None) -> Tensor:
        for layer in self.layers:
            x = run_block(layer, x, segments, rotation, checkpoint=self.checkpoint)
        return x


def learned_positions(learned: Tensor, side: int, grid: Tensor, segments: Segments, positions: Tensor) -> Tensor:
    """The position embedding of every patch, [P, width]; bicubic between those of the learned grid.

    Args:
        learned: [side * side, width].
        side: of the learned grid.
        grid: integers [images, 2], rows and columns in patches.
        segments: the images.
        positions: integers [P, 2], row and column of each patch.
    """
    picture = learned.view(side, side, -1).permute(2, 0, 1)[None]
    found = [learned[:0]]
    parts = torch.split(positions, list(segments.lengths))
    for (rows, columns), (row, column) in zip(grid.tolist(), (p.unbind(1) for p in parts), strict=True):
        table = learned
        if (rows, columns) != (side, side):
            table = F.interpolate(picture, (rows, columns), mode="bicubic", align_corners=False)[0].flatten(1).T
        found.append(table[row * columns + column])
    return torch.cat(found)
