"""A block of the decoder, and its sizes."""

from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor, nn

from dataserver.planning.job.fields import ModelSize
from trainclient.models.attention import Segments
from trainclient.models.layers import GatedMlp, SelfAttention, require_heads
from trainclient.models.norms import OffsetNorm, RmsNorm
from trainclient.models.rotary import RotaryScaling, RotarySections, Rotation

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class BackboneConfig:
    """Sizes of a backbone, and the variants of its blocks."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    groups: int
    """Key and value heads of grouped-query attention."""
    rotary_base: float
    vocab_size: int
    query_tokens: int
    """Learned query tokens for each generated image; 0 where the job generates none."""
    head_dim: int | None = None
    """Size of a head; by default width / heads."""
    norm_eps: float = NORM_EPS
    """Added to the mean square in all norms."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the outputs of attention have biases."""
    rotary_scaling: RotaryScaling | None = None
    """How the wave lengths of rotary positions are scaled, if at all."""
    positions: int = 0
    """Tokens of the longest sequence that its weights know, before all wave lengths are stretched alike (as
    `max_position_embeddings` counts them); 0: not said."""

    head_norms: bool = False
    """Whether queries and keys are normed head by head, before they are turned."""
    offset_norms: bool = False
    """Whether weights of norms count from one, as Gemma's do."""
    post_norms: bool = False
    """Whether norms follow attention and MLP, before their outputs are added."""
    activation: str | None = None
    """Activation of the gate: gelu_tanh; by default SiLU."""
    embed_scale: float = 0.0
    """Factor by which the embeddings of tokens are multiplied, rounded to their type; 0: not at all."""
    score_scale: float = 0.0
    """Factor by which scores of attention are multiplied; 0: head_dim^-0.5."""
    window: int = 0
    """Tokens that a token sees in windowed layers, counting itself; 0: no layer is windowed."""
    global_layers: tuple[int, ...] = ()
    """Numbers of the layers that see whole sequences, where others are windowed."""
    windowed_rotary_base: float = 0.0
    """Rotary base of windowed layers, whose wave lengths are never scaled; 0: that of all."""
    sections: RotarySections | None = None
    """Where given, positions have three axes (m-rope)."""
    deepstack: int = 0
    """Layers behind which further rows of the encoder are added to the embeddings of images (arXiv 2406.04334)."""
    two_way_images: bool = False
    """Whether the tokens of an image see each other both ways."""
    tied: bool = False
    """Whether the head is the embedding of tokens: one parameter."""

    def __post_init__(self) -> None:
        require_heads("a backbone", self.width, self.heads, self.groups, axes=1, head_dim=self.head_dim)
        if self.sections is not None and 2 * sum(self.sections.pairs) != self.head_size:
            raise ValueError(
                f"sections turn {sum(self.sections.pairs)} pairs of each head; heads of size {self.head_size} have "
                f"{self.head_size // 2}"
            )
        if self.deepstack > self.layers:
            raise ValueError(f"deepstack is {self.deepstack}, and there are {self.layers} layers; give no more")

    @property
    def image_width(self) -> int:
        """Width of the rows that it takes for images."""
        return (1 + self.deepstack) * self.width

    def window_of(self, layer: int) -> int:
        """Tokens that a token sees in a layer; 0: all of its sequence."""
        return 0 if layer in self.global_layers else self.window

    @property
    def size(self) -> ModelSize:
        """What operations and memory depend on."""
        return ModelSize(
            self.layers,
            self.width,
            self.mlp_width,
            self.heads,
            self.groups,
            self.vocab_size,
            head_dim=0 if self.heads * self.head_size == self.width else self.head_size,
            window=self.window,
            global_layers=len(self.global_layers),
            deepstack=self.deepstack,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that its weights know; 0: not said."""
        scaling = self.rotary_scaling
        stretched = scaling is not None and not scaling.original_positions
        return int(self.positions * scaling.factor) if stretched and scaling is not None else self.positions

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim


class BackboneBlock(nn.Module):
    """Pre-norm Llama block (arXiv 2302.13971, section 2.2); Gemma's norms also what it adds."""

    def __init__(self, config: BackboneConfig, number: int = 0) -> None:
        """Make layer `number` of the decoder."""
        super().__init__()
        norm = partial(OffsetNorm if config.offset_norms else RmsNorm, eps=config.norm_eps)
        self.attention_norm = norm(config.width)
        self.attention = SelfAttention(
            config.width,
            config.heads,
            config.groups,
            bias=config.qkv_bias,
            causal=True,
            output_bias=config.output_bias,
            head_dim=config.head_size,
            head_norm=norm if config.head_norms else None,
            window=config.window_of(number),
            two_way=config.two_way_images,
            score_scale=config.score_scale,
        )
        self.attention_post_norm = norm(config.width) if config.post_norms else nn.Identity()
        self.mlp_norm = norm(config.width)
        self.mlp = GatedMlp(config.width, config.mlp_width, config.activation or "silu")
        self.mlp_post_norm = norm(config.width) if config.post_norms else nn.Identity()

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation) -> Tensor:
        """[T, width] -> [T, width]."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), segments, rotation))
        return x + cast(Tensor, self.mlp_post_norm(self.mlp(self.mlp_norm(x))))
