"""Audio encoder: packed spectrograms of any length in, backbone embeddings out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataserver.planning.job.fields import ModelSize
from trainclient.models.attention import Segments
from trainclient.models.checks import require_shape
from trainclient.models.layers import ACTIVATIONS, Mlp, SelfAttention, require_heads, run_block
from trainclient.upload import upload

NORM_EPS = 1e-5
_KERNEL = 3
_LONGEST_WAVE = 10_000.0


@dataclass(frozen=True, slots=True)
class AudioEncoderConfig:
    """Sizes of an audio encoder."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    bins: int
    """Mel bins of a spectrogram."""
    merge: int
    """Positions whose mean becomes one embedding."""
    output_dim: int
    """Width of the backbone, which takes the embeddings."""
    positions: int = 1500
    """Longest clip in positions, of 20 ms each."""
    norm_eps: float = NORM_EPS
    """Added to the variance in all norms."""
    activation: str = "gelu"
    """Activation of the blocks' MLPs, as of `EncoderConfig`."""

    def __post_init__(self) -> None:
        require_heads("an audio encoder", self.width, self.heads, self.heads, axes=1)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; one of {', '.join(ACTIVATIONS)} is required")
        if self.width % 2:
            raise ValueError(f"width is {self.width}; an even one is required, for sines and cosines of positions")

    @property
    def row_width(self) -> int:
        """Width of the rows that it makes."""
        return self.output_dim

    @property
    def size(self) -> ModelSize:
        """What operations and memory depend on."""
        return ModelSize(self.layers, self.width, self.mlp_width, self.heads, self.heads)


class AudioBlock(nn.Module):
    """Pre-norm transformer block with attention inside each clip; keys have no bias (Whisper)."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = SelfAttention(
            config.width, config.heads, config.heads, bias=True, key_bias=False, causal=False
        )
        self.mlp_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config.width, config.mlp_width, activation=config.activation)

    def forward(self, x: Tensor, segments: Segments, rotation: None) -> Tensor:
        """[P, width] -> [P, width]."""
        x = x + self.attention(self.attention_norm(x), segments, rotation)
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


def sinusoids(shape: torch.Size) -> Tensor:
    """Positions as Whisper has them: sines, then cosines, of waves from 2 pi to 10,000 times as long. [n, width]."""
    count, width = shape
    steps = torch.arange(width // 2, dtype=torch.float64) / max(width // 2 - 1, 1)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * _LONGEST_WAVE**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class FixedPositions(nn.Embedding):
    """A table of positions that is not trained, and saved all the same."""

    initial_tables: ClassVar[Mapping[str, Callable[[torch.Size], Tensor]]] = {"weight": sinusoids}

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width)
        self.weight.requires_grad = False


class AudioEncoder(nn.Module):
    """Whisper's encoder (arXiv 2212.04356, section 2.2) on packed clips, with a projector to the backbone's width.

    Clips that are not padded attend to their own positions alone, and the means of `merge` positions become embeddings,
    as in Qwen2-Audio (arXiv 2407.10759).
    """

    projecting: ClassVar[tuple[str, ...]] = ("projector.",)
    """Beginnings of the names of what turns features into rows, which may have learning rates of its own."""
    beside_adapters: ClassVar[tuple[str, ...]] = projecting
    """Beginnings of the names of what is trained whole where blocks have adapters (`lora.adapt`)."""

    def __init__(self, config: AudioEncoderConfig, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        self.conv_in = nn.Conv1d(config.bins, config.width, _KERNEL, padding=1)
        self.conv_down = nn.Conv1d(config.width, config.width, _KERNEL, stride=2, padding=1)
        for convolution in (self.conv_in, self.conv_down):
            convolution.initial_std = (convolution.in_channels * _KERNEL) ** -0.5
        self.position_embed = FixedPositions(config.positions, config.width)
        self.layers = nn.ModuleList(AudioBlock(config) for _ in range(config.layers))
        self.output_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.projector = nn.Linear(config.width, config.output_dim)

    def forward(self, mel: Tensor, cu_frames: Tensor, cu_positions: Tensor) -> Tensor:
        """Embed every `merge` positions of each clip; those that are left over make no embedding.

        Args:
            mel: [F, bins]; F may be 0.
            cu_frames: integers [clips + 1], first frame of each clip. Better left on the CPU, as is the next.
            cu_positions: integers [clips + 1].

        Returns:
            [rows, output_dim] in the module's dtype.

        Raises:
            ValueError: the tensors do not agree with each other or with the config.
        """
        config = self.config
        x, lengths = self._embedded(mel, cu_frames, cu_positions)
        device = x.device
        segments = Segments.from_offsets("cu_positions", cu_positions, len(x), device)
        for layer in self.layers:
            x = run_block(layer, x, segments, None, checkpoint=self.checkpoint)
        if config.merge > 1:
            number = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64)
            whole = torch.tensor([n // config.merge * config.merge for n in lengths], dtype=torch.int64)
            used = number < whole.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
            x = x.index_select(0, upload(used.nonzero().squeeze(1), device))
            x = x.view(-1, config.merge, config.width).mean(dim=1)
        return cast(Tensor, self.projector(self.output_norm(x)))

    def _embedded(self, mel: Tensor, cu_frames: Tensor, cu_positions: Tensor) -> tuple[Tensor, list[int]]:
        """What the convolutions make of each clip, with positions: [P, width]; and the positions of each clip."""
        config, weight = self.config, self.conv_in.weight
        require_shape("mel", mel, -1, config.bins)
        frames, lengths = cu_frames.diff().tolist(), cu_positions.diff().tolist()
        if len(frames) != len(lengths) or sum(frames) != len(mel) or (lengths and max(lengths) > config.positions):
            raise ValueError(
                f"found {len(mel)} frames of {len(frames)} clips, with positions {lengths[:8]} of {len(lengths)}; "
                f"clips of at most {config.positions} positions, and cu_frames that end with the frames, are required"
            )
        clips = torch.split(mel.to(weight.device, weight.dtype), frames)
        shortest = mel.new_zeros(_KERNEL, config.bins, device=weight.device, dtype=weight.dtype)
        hidden, num_rows, starts = list[Tensor](), 0, torch.zeros(len(clips), dtype=torch.int64)
        for group in groups_of_like_lengths(frames):
            padded = nn.utils.rnn.pad_sequence([shortest, *(clips[n] for n in group)], batch_first=True)[1:]
            found = F.gelu(self.conv_down(F.gelu(self.conv_in(padded.transpose(1, 2))))).transpose(1, 2)
            starts[group] = num_rows + torch.arange(len(group)) * found.shape[1]
            hidden.append(found.flatten(0, 1))
            num_rows += len(hidden[-1])
        column = torch.cat([torch.arange(n) for n in lengths] or [torch.zeros(0, dtype=torch.int64)])
        at = upload(starts.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)) + column, weight.device)
        column = upload(column, weight.device)
        return torch.cat(hidden).index_select(0, at) + self.position_embed(column), lengths


def groups_of_like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Positions of all lengths in groups whose longest is at most twice the shortest; one that is empty without any.

    The convolutions of a group take its longest clip for each: so padding at most doubles the frames of a microbatch,
    and a minute of short clips beside one of 30 seconds does not become half an hour.
    """
    groups: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and lengths[n] <= 2 * lengths[groups[-1][0]]:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups or [[]]
