"""ViT encoder: packed images of any size in, backbone embeddings out."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from dataserver.planning.job.fields import ModelSize
from trainclient.models.attention import Segments
from trainclient.models.layers import ACTIVATIONS, GatedMlp, Mlp, SelfAttention, require_heads, run_block
from trainclient.models.learned_positions import SCALINGS, learned_positions
from trainclient.models.norms import RmsNorm
from trainclient.models.patches import normalise, patch_positions, pixel_statistics
from trainclient.models.projectors import PROJECTORS, NormedMerger, PatchEmbed, projector
from trainclient.models.rotary import Rotation
from trainclient.models.tile_rows import rows_with_ends
from trainclient.models.windows import window_order
from trainclient.upload import upload

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-6
LAYER_SCALE = 0.1
"""Initial factors of what blocks add, as InternVL's; DINOv2's begin with 1."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes of an encoder, and the variants of its blocks."""

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
    """How pixels are normalised: half (to [-1, 1]), clip or imagenet; or mean and deviation of each channel, such as
    `0.1 0.2 0.3 / 0.4 0.5 0.6`."""
    position_grid: int = 0
    """Side of a learned grid of positions, which is interpolated for images of other grids; 0: rotary positions."""
    class_token: bool = False
    """Whether a learned row stands before the patches of each image, and a norm before the first block, as in CLIP."""
    class_norm: bool = True
    """Whether that norm goes with a class token; InternVL's and DINOv2's have none."""
    registers: int = 0
    """Learned rows between the class token and the patches of each image, as in DINOv2."""
    query_bias: bool = True
    """Whether queries, keys and values have biases."""
    layer_scale: bool = False
    """Whether what attention and MLP of a block add is multiplied by learned factors, as in InternVL and DINOv2."""
    position_scaling: str | None = None
    """How learned positions are read for images of other grids: bilinear, nearest or antialias; by default bicubic."""
    rotary: bool = False
    """Whether positions are rotary beside learned ones; without learned ones they always are."""
    rms_norms: bool = False
    """Whether all norms are RMSNorm, without biases."""
    gated: bool = False
    """Whether the blocks' MLPs are gated."""
    window: int = 0
    """Side of the windows of attention, in blocks of merge x merge patches; 0: each patch sees its whole image."""
    global_layers: tuple[int, ...] = ()
    """Numbers of the layers that see whole images, where others are windowed."""
    second_frame: bool = False
    """Whether the embedding of patches has weights for a second frame, which a still image repeats."""
    projector: str | None = None
    """What makes rows of the backbone: mlp (without a norm before), normed_mlp (a norm of whole blocks before), linear
    or pool; by default Qwen2-VL's merger."""
    line_ends: bool = False
    """Whether lines of rows over all tiles of an image end with a learned row, as in LLaVA-OneVision."""
    deepstack: tuple[int, ...] = ()
    """Numbers of the layers whose outputs are projected as well, for the backbone's first layers: rows are wider."""

    def __post_init__(self) -> None:
        require_heads("an encoder", self.width, self.heads, self.heads, axes=2)
        pixel_statistics(self.pixels)
        choices = (("activation", ACTIVATIONS), ("position_scaling", SCALINGS))
        for name, known in (*choices, ("projector", PROJECTORS)):
            if getattr(self, name) not in known and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)!r}; one of {', '.join(known)} is required")
        if self.class_token and not self.position_grid:
            raise ValueError("class_token goes with learned positions; give position_grid as well")
        if self.registers and not self.class_token:
            raise ValueError("registers go with a class token; give class_token as well")
        if self.class_token and self.window:
            raise ValueError("a class token lies in no window; leave class_token or window out")
        if not set(self.deepstack) <= set(range(self.layers)):
            raise ValueError(f"deepstack names layers {list(self.deepstack)}; there are {self.layers}, from 0")

    @property
    def is_bare(self) -> bool:
        """Whether it is a tower of SigLIP's or CLIP's kind, which knows no merger: one begins untrained."""
        return self.position_grid > 0 and self.projector is None

    @property
    def row_width(self) -> int:
        """Width of the rows that it makes."""
        return (1 + len(self.deepstack)) * self.output_dim

    def norm(self, width: int) -> nn.Module:
        """A norm of its kind."""
        return RmsNorm(width, self.norm_eps) if self.rms_norms else nn.LayerNorm(width, eps=self.norm_eps)

    def patch_embedding(self) -> PatchEmbed:
        """The layer that embeds patches."""
        return PatchEmbed(self.patch, self.width, bias=self.patch_bias, frames=1 + self.second_frame)

    @property
    def size(self) -> ModelSize:
        """What operations and memory depend on."""
        return ModelSize(
            self.layers,
            self.width,
            self.mlp_width,
            self.heads,
            self.heads,
            gated=self.gated,
            window=(self.window * self.merge) ** 2,
            global_layers=len(self.global_layers),
            deepstack=len(self.deepstack),
        )


class EncoderBlock(nn.Module):
    """Pre-norm transformer block with attention inside each image."""

    initial_values = MappingProxyType({"attention_scale": LAYER_SCALE, "mlp_scale": LAYER_SCALE})

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention_norm = config.norm(config.width)
        bias = config.query_bias
        self.attention = SelfAttention(
            config.width, config.heads, config.heads, bias=bias, causal=False, output_bias=True
        )
        self.mlp_norm = config.norm(config.width)
        if config.gated:
            self.mlp: nn.Module = GatedMlp(config.width, config.mlp_width, config.activation, bias=True)
        else:
            self.mlp = Mlp(config.width, config.mlp_width, activation=config.activation)
        if config.layer_scale:
            self.attention_scale = nn.Parameter(torch.empty(config.width))
            self.mlp_scale = nn.Parameter(torch.empty(config.width))
        self.is_scaled = config.layer_scale

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation | None) -> Tensor:
        """[P, width] -> [P, width]."""
        mixed = self.attention(self.attention_norm(x), segments, rotation)
        x = x + (self.attention_scale * mixed if self.is_scaled else mixed)
        made = cast(Tensor, self.mlp(self.mlp_norm(x)))
        return x + (self.mlp_scale * made if self.is_scaled else made)


class ImageEncoder(nn.Module):
    """Vision transformer (arXiv 2010.11929) on packed images, with a projector to the backbone's width.

    Positions are rotary in two dimensions (Qwen2-VL, arXiv 2409.12191), learned (SigLIP, arXiv 2303.15343; CLIP, arXiv
    2103.00020), or both (Qwen3-VL).
    """

    projecting: ClassVar[tuple[str, ...]] = ("merger.", "deepstack.", "line_end")
    """Beginnings of the names of what turns features into rows, which may have learning rates of its own."""
    beside_adapters: ClassVar[tuple[str, ...]] = projecting
    """Beginnings of the names of what is trained whole where blocks have adapters (`lora.adapt`)."""

    def __init__(self, config: EncoderConfig, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        self.patch_embed = config.patch_embedding()
        if config.position_grid:
            self.position_embed = nn.Embedding(config.position_grid**2 + config.class_token, config.width)
        if config.class_token:
            self.class_embed = nn.Parameter(torch.empty(config.width))
            self.input_norm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.class_norm else nn.Identity()
        if config.registers:
            self.register_embed = nn.Parameter(torch.empty(config.registers, config.width))
        if config.line_ends:
            self.line_end = nn.Parameter(torch.empty(config.output_dim))
        self.layers = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        sizes = config.width, config.merge, config.output_dim, config.norm_eps
        normed = config.projector not in ("mlp", "normed_mlp")
        self.merger_norm = config.norm(config.width) if normed else nn.Identity()
        self.merger = projector(config.projector or "merger", *sizes)
        self.deepstack = nn.ModuleList(NormedMerger(*sizes) for _ in config.deepstack)

    def forward(self, patches: Tensor, grid: Tensor, cu_patches: Tensor, tiles: Tensor | None = None) -> Tensor:
        """Embed every block of merge x merge patches.

        Args:
            patches: uint8 [P, patch * patch * 3], merge-block-major inside each image; P may be 0. Of videos, whose
                groups of two frames are images here, [P, 2 * patch * patch * 3], where `second_frame` is set.
            grid: integers [images, 2], rows and columns in patches. Better left on the CPU, as are the next ones.
            cu_patches: integers [images + 1].
            tiles: integers [images, 6], how images are cut whose parts the others are then of; with `line_ends` only.

        Returns:
            [P / merge^2, row_width] in the module's dtype: the projected features, and those of `deepstack` behind.
            With `line_ends` as many as `rows_with_ends` lays out.

        Raises:
            ValueError: the tensors do not agree with each other or with the config.
        """
        config = self.config
        *earlier, last = self._hidden(patches, grid, cu_patches)
        rows = self.merger(self.merger_norm(last).view(-1, config.width * config.merge**2))
        if config.line_ends:
            if tiles is None:
                raise ValueError("the lines of rows have ends, and nothing says how images are cut; give tiles")
            rows = rows_with_ends(rows, tiles, int(grid[0, 0]) if len(grid) else 1, self.line_end)
        more = (merger(x) for merger, x in zip(self.deepstack, earlier, strict=True))
        return torch.cat([rows, *more], dim=1) if earlier else cast(Tensor, rows)

    def features(self, patches: Tensor, grid: Tensor, cu_patches: Tensor) -> Tensor:
        """What the last block makes of every patch, [P, width]; arguments and errors are those of `forward`."""
        return self._hidden(patches, grid, cu_patches)[-1]

    def _hidden(self, patches: Tensor, grid: Tensor, cu_patches: Tensor) -> list[Tensor]:
        """What the layers of `deepstack`, and then the last one, make of every patch, [P, width] each."""
        config, weight = self.config, self.patch_embed.weight
        segments = Segments.from_offsets("cu_patches", cu_patches, patches.shape[0], weight.device)
        positions = patch_positions(grid, segments, config.merge, weight.device)
        frames = patches.to(weight.device).reshape(-1, config.patch**2 * 3) if self._has_all(patches) else patches
        pixels = normalise(frames.to(weight.device), config.patch, weight.dtype, config.pixels)
        x: Tensor = self.patch_embed(pixels.view(patches.shape))
        if config.position_grid:
            learned, side = self.position_embed.weight[int(config.class_token) :], config.position_grid
            scaling = config.position_scaling or "bicubic"
            x = x + learned_positions(learned, side, grid, segments, positions, scaling)
        if config.class_token:
            return self._with_class_token(x, segments, cu_patches)
        rotated = config.rotary or not config.position_grid
        if not config.window:
            return self._run(x, (segments, segments), self._rotation(positions, x) if rotated else None)
        order, ends = window_order(grid.tolist(), config.merge, config.window)
        index = upload(torch.from_numpy(order), weight.device)
        windows = Segments.from_offsets("windows", torch.from_numpy(ends), len(x), weight.device)
        rotation = self._rotation(positions.index_select(0, index), x) if rotated else None
        found = self._run(x.index_select(0, index), (segments, windows), rotation)
        return [rows.index_select(0, index.argsort()) for rows in found]

    def _has_all(self, patches: Tensor) -> bool:
        """Whether patches are of all the frames that the embedding knows, not of still images."""
        return patches.dim() == 2 and patches.shape[1] == self.patch_embed.in_features

    def _rotation(self, positions: Tensor, x: Tensor) -> Rotation:
        return Rotation.of(positions, self.config.width // self.config.heads, ROTARY_BASE, x.dtype)

    def _with_class_token(self, x: Tensor, segments: Segments, cu_patches: Tensor) -> list[Tensor]:
        """Run the blocks on patches with some rows before those of each image; the results have none of these."""
        count = 1 + self.config.registers
        offsets = cu_patches.cpu().to(torch.int64) + count * torch.arange(len(segments) + 1)
        before = (offsets[:-1, None] + torch.arange(count)).flatten()
        is_patch = torch.ones(int(offsets[-1]), dtype=torch.bool).index_fill(0, before, False)
        rows = upload(is_patch.nonzero().squeeze(1), x.device)
        first = (self.class_embed + self.position_embed.weight[0])[None]
        if self.config.registers:
            first = torch.cat([first, self.register_embed])
        with_first = x.new_zeros(len(is_patch), x.shape[1]).index_copy(0, rows, x)
        with_first = with_first.index_copy(0, upload(before, x.device), first.repeat(len(segments), 1).to(x.dtype))
        whole = Segments.from_offsets("cu_patches", offsets, len(is_patch), x.device)
        found = self._run(self.input_norm(with_first), (whole, whole), None)
        return [hidden.index_select(0, rows) for hidden in found]

    def _run(self, x: Tensor, partitions: tuple[Segments, Segments], rotation: Rotation | None) -> list[Tensor]:
        """Run the blocks; partitions are whole images, and windows."""
        found = []
        for number, layer in enumerate(self.layers):
            segments = partitions[0 if number in self.config.global_layers else 1]
            x = run_block(layer, x, segments, rotation, checkpoint=self.checkpoint)
            if number in self.config.deepstack:
                found.append(x)
        return [*found, x]
