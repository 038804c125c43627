"""How a video becomes frames, and frames become rows for the tower of an encoder."""

from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from dataserver.planning.job.fields.values import DecimalString, SpecModel

MAX_SAMPLED_FRAMES: Final = 4096
"""The most frames of a video that a job may read."""
_QWEN_FPS: Final = "2"
_QWEN_FRAMES: Final = (4, 768)
_MILLI: Final = 1_000
MICROSECONDS: Final = 1_000_000
_MAX_FPS: Final = 240


class FrameRule(StrEnum):
    """Which frames of a video are read."""

    QWEN = "qwen"
    """Qwen2-VL, Qwen2.5-VL: `fps` frames for each second, at least `min_frames`, at most `max_frames`, a multiple of
    `temporal_patch`, and never more than there are; spread evenly over the video."""
    UNIFORM = "uniform"
    """`max_frames` frames of every video, or all where it has fewer; spread evenly over the video."""


class VideoSizing(SpecModel):
    """How videos become frames and patches, as in the vision towers of Qwen2-VL and Qwen2.5-VL.

    The sides of frames are rounded to merge blocks by the rule `qwen` with bounds of their own; patch, merge and filter
    are those of images.
    """

    rule: FrameRule = FrameRule.QWEN
    """Which frames are read."""
    fps: DecimalString | None = None
    """Only with `qwen`: frames for each second, with at most three digits after the point; by default 2."""
    min_frames: Annotated[int, Field(ge=1, le=MAX_SAMPLED_FRAMES)] | None = None
    """Only with `qwen`: a short video has so many frames, if it holds so many; by default 4."""
    max_frames: Annotated[int, Field(ge=1, le=MAX_SAMPLED_FRAMES)] = _QWEN_FRAMES[1]
    """A long video has no more frames than this; with `uniform` every video has so many, if it holds so many."""
    min_pixels: Annotated[int, Field(ge=1, le=2**31)] = 128 * 28 * 28
    """Smaller frames are enlarged to so many pixels; `size.shortest_edge` of video_preprocessor_config.json."""
    max_pixels: Annotated[int, Field(ge=1, le=2**31)] = 768 * 28 * 28
    """Larger frames are scaled down to so many pixels; `size.longest_edge` of video_preprocessor_config.json."""
    temporal_patch: Annotated[int, Field(ge=1, le=8)] = 2
    """Frames that a patch spans. The last frame is repeated where too few are left."""
    positions_per_second: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Of `rotary_positions`: steps of a second along the axis of time, as `tokens_per_second` of Qwen2.5-VL, which is
    2. By default each `temporal_patch` frames are a step (Qwen2-VL)."""

    @field_validator("fps")
    @classmethod
    def _is_rate(cls, fps: str | None) -> str | None:
        if fps is not None and not (0 < Fraction(fps) <= _MAX_FPS and (Fraction(fps) * _MILLI).denominator == 1):
            raise ValueError(
                f"video.fps is {fps}; more than 0 and at most {_MAX_FPS}, with at most three digits after the point, "
                "is required"
            )
        return None if fps == _QWEN_FPS else fps

    @field_validator("min_frames")
    @classmethod
    def _plain(cls, min_frames: int | None) -> int | None:
        """Two jobs that say the same have one identity."""
        return None if min_frames == _QWEN_FRAMES[0] else min_frames

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("fps", "min_frames") if getattr(self, name) is not None]
        if self.rule is FrameRule.UNIFORM and given:
            raise ValueError(
                f"video.rule uniform has no use for {' and '.join(given)}; leave it out, or take rule qwen"
            )
        if self.rule is FrameRule.QWEN and self.least_frames > self.max_frames:
            raise ValueError(f"video.max_frames is {self.max_frames}, less than min_frames {self.least_frames}")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"video.max_pixels is {self.max_pixels}, less than min_pixels {self.min_pixels}")
        return self

    @property
    def milli_fps(self) -> int:
        """Frames read of a thousand seconds of video."""
        return int(Fraction(self.fps or _QWEN_FPS) * _MILLI)

    @property
    def least_frames(self) -> int:
        """Frames of a short video."""
        return self.min_frames or min(_QWEN_FRAMES[0], self.max_frames)

    @property
    def max_groups(self) -> int:
        """Groups of `temporal_patch` frames of the longest video."""
        return -(-self.max_frames // self.temporal_patch)


def sampled_frames(frames: int, microseconds: int, sizing: VideoSizing) -> int:
    """Frames that are read of a video.

    Args:
        frames: that it holds.
        microseconds: from its first frame to the end of its last one.
        sizing: the rule.
    """
    if sizing.rule is FrameRule.UNIFORM:
        return min(sizing.max_frames, frames)
    # Half a microsecond more, by which durations are rounded.
    wanted = (2 * microseconds + 1) * sizing.milli_fps // (2 * MICROSECONDS * _MILLI)
    wanted = min(max(wanted, sizing.least_frames), sizing.max_frames, frames)
    return wanted // sizing.temporal_patch * sizing.temporal_patch or wanted


def frame_groups(frames: int, microseconds: int, sizing: VideoSizing) -> int:
    """Groups of `temporal_patch` frames of a video; arguments as `sampled_frames`."""
    return -(-sampled_frames(frames, microseconds, sizing) // sizing.temporal_patch)
