"""How a video becomes frames, and frames become rows for the tower of an encoder."""

from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, Final, Self

from pydantic import Field, field_validator, model_validator

from dataserver.planning.job.fields.tiles import OF_JSON, Ids
from dataserver.planning.job.fields.values import DecimalString, SpecModel, TokenId

MAX_SAMPLED_FRAMES: Final = 4096
"""The most frames of a video that a job may read."""
MAX_PIXELS: Final = 2**31
"""Most pixels that a job may ask for, of an image, a frame or, with the rule `qwen3`, a video."""
_QWEN_FPS: Final = "2"
_QWEN_FRAMES: Final = (4, 768)
_QWEN3_PIXELS: Final = (4 * 32 * 32, 24 * 1024 * 32 * 32)
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
    QWEN3 = "qwen3"
    """Qwen3-VL: as `qwen`, but any number of frames, from the first one of the video to its last; all frames of a video
    together have `min_pixels` to `max_pixels`."""


class Timestamps(SpecModel):
    """Tokens of text around each group of frames: its time in seconds, with one digit after the point."""

    before: Ids = ()
    """Before the seconds."""
    digits: Annotated[tuple[TokenId, ...], Field(min_length=10, max_length=10), OF_JSON]
    """The digits 0 to 9."""
    point: Ids
    """Between seconds and tenths."""
    after: Ids
    """After the tenths, before the embeddings of the group."""
    end: Ids = ()
    """After the embeddings of the group."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all tokens around a timestamp and in it."""
        return *self.before, *self.digits, *self.point, *self.after, *self.end

    @property
    def tokens_beside_digits(self) -> int:
        """Tokens around a group, beside the digits before the point."""
        return len(self.before) + len(self.point) + 1 + len(self.after) + len(self.end)

    def ids_of(self, tenths: int) -> list[int]:
        """Ids before the embeddings of a group at so many tenths of a second."""
        seconds, tenth = divmod(tenths, 10)
        digits = [self.digits[int(digit)] for digit in str(seconds)]
        return [*self.before, *digits, *self.point, self.digits[tenth], *self.after]


class VideoSizing(SpecModel):
    """How videos become frames and patches, as in the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    The sides of frames are rounded to merge blocks by the rule `qwen` with bounds of their own; patch, merge and filter
    are those of images.
    """

    rule: FrameRule = FrameRule.QWEN
    """Which frames are read."""
    fps: DecimalString | None = None
    """Not with `uniform`: frames per second, with at most three digits after the point; by default 2."""
    min_frames: Annotated[int, Field(ge=1, le=MAX_SAMPLED_FRAMES)] | None = None
    """Not with `uniform`: fewest frames of a video, if it has so many; by default 4."""
    max_frames: Annotated[int, Field(ge=1, le=MAX_SAMPLED_FRAMES)] = _QWEN_FRAMES[1]
    """Most frames of a video; with `uniform` the number of frames of every video, if it has so many."""
    min_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] = 128 * 28 * 28
    """Smaller frames are enlarged to this number of pixels; `size.shortest_edge` of video_preprocessor_config.json.
    With `qwen3` it is the number for all frames of a video together, by default 4,096."""
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] = 768 * 28 * 28
    """Larger frames are scaled down to this number of pixels; `size.longest_edge` of video_preprocessor_config.json.
    With `qwen3` it is the number for all frames of a video together, by default 25,165,824."""
    max_frame_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Only with `qwen3`: most tokens of a frame, whatever the pixels of its video, as `max_video_tokens` with
    `cap_pixels_per_frame`. By default a short video may have large frames."""
    temporal_patch: Annotated[int, Field(ge=1, le=8)] = 2
    """Frames that a patch spans. If too few are left, the last frame is repeated."""
    positions_per_second: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Steps per second along the time axis of `rotary_positions`, like `tokens_per_second` of Qwen2.5-VL, which is 2.
    By default every `temporal_patch` frames are one step (Qwen2-VL)."""
    timestamps: Timestamps | None = None
    """Only with `qwen3`, and not with `contrastive_batch`: the text around each group of frames, as Qwen3-VL's
    processor writes it; each group then has the positions of an image. A server fills it in if conversations leave
    `template` to it and the tokenizer's folder has that processor. By default groups follow each other without text."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """State the bounds that a rule has by default: whoever reads a complete job then need not know the rule."""
        if not isinstance(data, dict) or data.get("rule") != FrameRule.QWEN3:
            return data
        least, most = _QWEN3_PIXELS
        return {"min_pixels": least, "max_pixels": most, **data}

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
        if self.rule is not FrameRule.QWEN3:
            needs_qwen3 = [name for name in ("max_frame_tokens", "timestamps") if getattr(self, name) is not None]
            if needs_qwen3:
                raise ValueError(
                    f"video.rule {self.rule} has no use for {' and '.join(needs_qwen3)}; leave it out, or take rule "
                    "qwen3"
                )
        if self.timestamps is not None and self.positions_per_second is not None:
            raise ValueError(
                "video.timestamps tell times as text, and positions_per_second as positions; leave one of them out"
            )
        if self.rule is not FrameRule.UNIFORM and self.least_frames > self.max_frames:
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

    def most_pixels(self, frames: int, block: int) -> int:
        """Most pixels of so many frames together, by the rule `qwen3`; `block` is the side of a token in pixels."""
        if self.max_frame_tokens is None:
            return self.max_pixels
        least = self.min_pixels * 21 // 20
        return max(min(self.max_frame_tokens * block**2, self.max_pixels // frames), least) * frames

    def frame_pixels(self, block: int) -> tuple[int, int]:
        """Fewest and most pixels to which a frame is scaled, whatever its video holds; `block` as above."""
        if self.rule is not FrameRule.QWEN3:
            return self.min_pixels, self.max_pixels
        span = self.temporal_patch
        most = self.most_pixels(span, block) // span
        if self.max_frame_tokens is not None:  # frames are counted in groups, rounded: 3 may count as 2
            most = most * 3 // 2
        return -(-self.min_pixels // span), max(1, most)

    @property
    def max_groups(self) -> int:
        """Groups of `temporal_patch` frames of the longest video."""
        return -(-self.max_frames // self.temporal_patch)
