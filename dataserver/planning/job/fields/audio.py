"""How an audio clip becomes rows for the tower of an encoder."""

from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from dataserver.planning.job.fields.values import SpecModel

SAMPLE_RATE: Final = 16_000
"""Samples a second of what spectrograms are made of."""
HOP: Final = 160
"""Samples from one frame of a spectrogram to the next: 100 frames a second."""
LEAST_FRAMES: Final = 3
"""Frames of the shortest clip; a shorter one is filled up with silence."""
_STRIDE: Final = 2
"""Stride of the second convolution of Whisper's tower, by which positions are fewer than frames."""
MAX_CLIP_SECONDS: Final = 30
"""The most of a clip that a job may read."""


class AudioSizing(SpecModel):
    """How audio clips become log-mel spectrograms and rows, as in the towers of Whisper and Qwen2-Audio."""

    bins: Annotated[int, Field(ge=8, le=256)] = 128
    """Mel bins of a spectrogram: 80 of Whisper up to large-v2, 128 of large-v3 and Qwen2-Audio."""
    merge: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of the tower's positions that become one backbone token; positions that are left over at the end of a clip
    make none. A position is two frames, 20 ms: 1 gives 50 tokens per second, 2 (Qwen2-Audio) gives 25."""
    max_seconds: Annotated[int, Field(ge=1, le=MAX_CLIP_SECONDS)] = MAX_CLIP_SECONDS
    """Longest clip in seconds; the rest of a longer one is cut off."""
    padded: bool | None = None
    """Whether every clip is filled up with silence to `max_seconds`, as Whisper's tower was trained; by default a clip
    has the positions of its own length (Qwen2-Audio)."""

    @field_validator("padded")
    @classmethod
    def _plain(cls, padded: bool | None) -> bool | None:
        """Two jobs that say the same have one identity."""
        return padded or None

    @model_validator(mode="after")
    def _check(self) -> Self:
        least = (LEAST_FRAMES - 1) // _STRIDE + 1
        most = self.max_frames // _STRIDE
        if self.merge > (most if self.padded else least):
            raise ValueError(
                f"audio.merge is {self.merge}; at most {least} are required where clips are not padded, whose shortest "
                f"has {least} positions, and {most} where they are: lower merge, or set padded to true"
            )
        return self

    @property
    def max_frames(self) -> int:
        """Frames of the longest clip."""
        return self.max_seconds * SAMPLE_RATE // HOP


def clip_samples(samples: int, sample_rate: int) -> int:
    """Samples of a clip at `SAMPLE_RATE`, rounded up.

    Args:
        samples: of each channel, as it is stored.
        sample_rate: as it is stored.
    """
    return -(-samples * SAMPLE_RATE // sample_rate)


def clip_frames(samples: int, sample_rate: int, sizing: AudioSizing) -> int:
    """Frames of a clip that its tower attends to; arguments as `clip_samples`."""
    if sizing.padded:
        return sizing.max_frames
    frames = -(-clip_samples(samples, sample_rate) // HOP)
    return max(LEAST_FRAMES, min(frames, sizing.max_frames))


def clip_positions(frames: int) -> int:
    """Positions of the tower, which follow from a clip's frames as its convolutions make them (Whisper)."""
    return (frames - 1) // _STRIDE + 1


def served_frames(positions: int, sizing: AudioSizing) -> int:
    """Frames of a spectrogram that positions of the tower read: its convolutions overlap, and reach beyond the clip."""
    return min(_STRIDE * positions + 1, sizing.max_frames)
