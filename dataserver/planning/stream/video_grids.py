"""Patch grids of frames of videos. All in integers."""

from fractions import Fraction
from functools import lru_cache
from math import floor, isqrt

import numpy as np

from dataserver.planning import I32, I64
from dataserver.planning.job.fields import MAX_ASPECT, FrameRule, Sizing
from dataserver.planning.stream.doubles import as_double
from dataserver.planning.stream.grids import patch_grids, scaled_in_doubles


def video_grids(widths: I32, heights: I32, sampled: I64, sizing: Sizing) -> tuple[I32, I32]:
    """Rows and columns of patches of a frame of each video, int32 [k] each.

    Args:
        widths, heights: int32 [k], upright pixels of a frame, positive.
        sampled: int64 [k], frames that are read of each.
        sizing: patch, merge, and the rule of videos.
    """
    video = sizing.video
    if video is None or video.rule is not FrameRule.QWEN3:
        return patch_grids(widths, heights, sizing.of_frames)
    block, span = sizing.patch * sizing.merge, video.temporal_patch
    each = zip(np.maximum(sampled, span).tolist(), widths.tolist(), heights.tolist(), strict=True)
    found = [
        _blocks(frames, width, height, block, span, video.min_pixels, video.most_pixels(frames, block))
        for frames, width, height in each
    ]
    rows, columns = np.array(found, np.int32).reshape(-1, 2).T * np.int32(sizing.merge)
    return rows, columns


@lru_cache(1 << 16)
def _blocks(frames: int, width: int, height: int, block: int, span: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of merge blocks by `smart_resize` of Qwen3-VL's video processor (transformers 5.24).

    Args:
        frames: that are read, at least `span`.
        width, height: of a frame, in pixels.
        block: pixels of a merge block's side.
        span: frames of a patch.
        least, most: pixels of all frames together.
    """
    if (short := min(width, height)) < block:
        scale = as_double(Fraction(block, short))
        width, height = (floor(as_double(side * scale)) for side in (width, height))
    width, height = min(width, MAX_ASPECT * height), min(height, MAX_ASPECT * width)
    rows, columns = (round(Fraction(side, block)) for side in (height, width))
    pixels = round(Fraction(frames, span)) * span * rows * columns * block**2
    if least <= pixels <= most:
        return rows, columns
    is_enlarged, bound = pixels <= most, least if pixels <= most else most
    found = []
    for side, other in ((height, width), (width, height)):
        above, below = side * bound, frames * other * block**2
        root = isqrt(above // below)
        if root**2 * below == above:
            return scaled_in_doubles(width, height, frames, block, bound, is_enlarged)
        found.append(max(1, root + is_enlarged))
    return found[0], found[1]
