"""Which frames of a video are read, and the times that a processor writes of them. All in integers.

A video of m frames has them at an even rate, as far as this module knows; `dataserver.video` looks at their times.
Processors of transformers (5.24) compute in doubles. Where they round what is exactly whole or half, what they find
depends on how their doubles were rounded: these few cases are computed as they are (`doubles`).
"""

from bisect import bisect_left
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import Final

from dataserver.planning.job.fields import MICROSECONDS, FrameRule, VideoSizing
from dataserver.planning.stream.doubles import as_double

_MILLI: Final = 1_000
_TENTHS: Final = 10
_DIGITS: Final = 4
"""Most digits of a video's seconds."""


def sampled_frames(frames: int, microseconds: int, sizing: VideoSizing) -> int:
    """Frames that are read of a video.

    Args:
        frames: that it holds.
        microseconds: from its first frame to the end of its last one.
        sizing: the rule.
    """
    if sizing.rule is FrameRule.UNIFORM:
        return min(sizing.max_frames, frames)
    if sizing.rule is FrameRule.QWEN3:
        wanted = _frames_at(sizing.milli_fps, frames, frame_rate(frames, microseconds))
        return min(max(wanted, sizing.least_frames), sizing.max_frames, frames)
    # Half a microsecond more, by which durations are rounded.
    wanted = (2 * microseconds + 1) * sizing.milli_fps // (2 * MICROSECONDS * _MILLI)
    wanted = min(max(wanted, sizing.least_frames), sizing.max_frames, frames)
    return wanted // sizing.temporal_patch * sizing.temporal_patch or wanted


def frame_groups(frames: int, microseconds: int, sizing: VideoSizing) -> int:
    """Groups of `temporal_patch` frames of a video; arguments as `sampled_frames`."""
    return -(-sampled_frames(frames, microseconds, sizing) // sizing.temporal_patch)


def frame_number(i: int, wanted: int, frames: int, rule: FrameRule) -> int:
    """Which frame of a video, from 0 on, is read as number i of `wanted`."""
    if rule is not FrameRule.QWEN3:
        return i * frames // wanted
    # From the first to the last, as `np.linspace(0, frames - 1, wanted).round()`.
    last, gaps = frames - 1, wanted - 1
    if i in (0, gaps):
        return last if i else 0
    whole, rest = divmod(i * last, gaps)
    if 2 * rest != gaps:
        return whole + (2 * rest > gaps)
    return round(as_double(i * as_double(Fraction(last, gaps))))


@lru_cache(1 << 12)
def frame_rate(frames: int, microseconds: int) -> Fraction:
    """Frames a second: of all rates whose duration is rounded to so many microseconds, the simplest."""
    halves = 2 * max(1, microseconds)
    return _simplest(Fraction(2 * MICROSECONDS * frames, halves + 1), Fraction(2 * MICROSECONDS * frames, halves - 1))


def group_tenths(frames: int, microseconds: int, sizing: VideoSizing) -> list[int]:
    """The time of each group of frames of a video in tenths of a second, ascending; arguments as `sampled_frames`.

    It is halfway between the times of its first and its last frame, and that of frame k is k / rate.
    """
    wanted = sampled_frames(frames, microseconds, sizing)
    return [
        _group_tenths(group, wanted, frames, microseconds, sizing)
        for group in range(-(-wanted // sizing.temporal_patch))
    ]


def timestamp_tokens(frames: int, microseconds: int, sizing: VideoSizing) -> int:
    """Tokens of the text before and behind all groups of frames of a video; arguments as `sampled_frames`."""
    if sizing.timestamps is None:
        return 0
    wanted = sampled_frames(frames, microseconds, sizing)
    groups = range(-(-wanted // sizing.temporal_patch))
    digits = len(groups)
    for more in range(1, _DIGITS):
        least = _TENTHS ** (more + 1)
        first = bisect_left(groups, least, key=lambda group: _group_tenths(group, wanted, frames, microseconds, sizing))
        digits += len(groups) - first
    return len(groups) * sizing.timestamps.tokens_beside_digits + digits


def _group_tenths(group: int, wanted: int, frames: int, microseconds: int, sizing: VideoSizing) -> int:
    """The time of one group of frames; arguments as `group_tenths`."""
    first = group * sizing.temporal_patch
    last = min(first + sizing.temporal_patch, wanted) - 1  # which is repeated where too few are left
    first, last = (frame_number(i, wanted, frames, sizing.rule) for i in (first, last))
    return _tenths(first, last, frame_rate(frames, microseconds))


def _tenths(first: int, last: int, rate: Fraction) -> int:
    """As `f"{(first / rate + last / rate) / 2:.1f}"`, in tenths."""
    found, rest = divmod(_TENTHS * (first + last) * rate.denominator, 2 * rate.numerator)
    if rest != rate.numerator:
        return found + (rest > rate.numerator)
    of_doubles = as_double(rate)
    begin, end = (as_double(Fraction(number, of_doubles)) if number else Fraction(0) for number in (first, last))
    return round(Fraction(as_double(begin + end) * _TENTHS, 2))


def _frames_at(milli_fps: int, frames: int, rate: Fraction) -> int:
    """As `int(frames / rate * fps)`."""
    found, rest = divmod(frames * rate.denominator * milli_fps, rate.numerator * _MILLI)
    if rest:
        return found
    seconds = as_double(Fraction(frames, as_double(rate)))
    return floor(as_double(seconds * as_double(Fraction(milli_fps, _MILLI))))


def _simplest(low: Fraction, high: Fraction) -> Fraction:
    """The fraction with the least numbers of all from `low` to `high`, both positive."""
    if (whole := ceil(low)) <= high:
        return Fraction(whole)
    below = floor(low)
    return below + Fraction(1, _simplest(Fraction(1, high - below), Fraction(1, low - below)))
