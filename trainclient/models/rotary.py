"""Rotary positions: by which angles queries and keys are turned."""

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and angles: float64 stays, anything smaller becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Stretches rotary wave lengths for longer sequences: all of them, or the long ones, as in Llama 3.1."""

    factor: float
    """Factor by which wave lengths grow."""
    original_positions: int = 0
    """Longest sequence before; 0 stretches all wave lengths alike."""
    low: float = 1.0
    """Waves with fewer turns than this in such a sequence are stretched."""
    high: float = 4.0
    """Waves with more turns are not; between the two, partly."""

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Stretch the frequencies, as far as the model asks for it."""
        stretched = frequencies / self.factor
        if not self.original_positions:
            return stretched
        kept = ((self.original_positions * frequencies / (2 * pi) - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * stretched + kept * frequencies


@dataclass(frozen=True, slots=True)
class RotarySections:
    """Which pairs of a head turn by the positions in time, height and width (Qwen2-VL, arXiv 2409.12191)."""

    pairs: tuple[int, int, int]
    """Pairs that each axis turns; together half of a head."""
    interleaved: bool = False
    """Whether height and width take turns with time, as in Qwen3-VL; otherwise each axis has a block of pairs."""

    @property
    def axes(self) -> list[int]:
        """The axis of each pair."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.pairs) for _ in range(count)]
        number = range(sum(self.pairs))
        return [n % 3 if n < 3 * self.pairs[n % 3] else 0 for n in number]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotary position embedding of each row (RoFormer, arXiv 2104.09864): cosines and sines [rows, 1, head_dim / 2]."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(
        cls, positions: Tensor, head_dim: int, base: float, dtype: torch.dtype, scaling: RotaryScaling | None = None
    ) -> "Rotation":
        """Rotation by positions along one or more axes.

        Args:
            positions: integers [rows, axes]; each axis turns an equal share of the head_dim / 2 pairs.
            head_dim: a multiple of 2 * axes.
            base: of the geometric series of wave lengths.
            dtype: of the activations; the result is at least float32. Angles are taken in float64.
            scaling: of the wave lengths.
        """
        frequencies = _frequencies(head_dim // (2 * positions.shape[1]), base, positions.device, scaling)
        return cls._by((positions.to(torch.float64)[:, :, None] * frequencies).flatten(1), dtype)

    @classmethod
    def in_sections(
        cls,
        positions: Tensor,
        sections: RotarySections,
        base: float,
        dtype: torch.dtype,
        scaling: RotaryScaling | None = None,
    ) -> "Rotation":
        """Rotation by positions in time, height and width that share one series of wave lengths (m-rope).

        Args:
            positions: integers [rows, 3].
            sections: which pairs of a head each axis turns.
            base: of the geometric series of wave lengths.
            dtype: of the activations.
            scaling: of the wave lengths.
        """
        frequencies = _frequencies(sum(sections.pairs), base, positions.device, scaling)
        axes = torch.tensor(sections.axes, device=positions.device)
        return cls._by(positions.to(torch.float64).index_select(1, axes) * frequencies, dtype)

    @classmethod
    def _by(cls, angles: Tensor, dtype: torch.dtype) -> "Rotation":
        """By angles float64 [rows, head_dim / 2]."""
        precise = at_least_float32(dtype)
        return cls(angles.cos().to(precise)[:, None], angles.sin().to(precise)[:, None])

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [rows, heads, head_dim]; same shape and dtype."""
        first, second = heads.to(self.cosine.dtype).chunk(2, dim=-1)
        turned = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return torch.cat(turned, dim=-1).to(heads.dtype)


def _frequencies(pairs: int, base: float, device: torch.device, scaling: RotaryScaling | None) -> Tensor:
    """Frequency of each pair, float64 [pairs]."""
    frequencies = base ** -(torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
    return frequencies if scaling is None else scaling(frequencies)
