"""The digest of what this installation makes of known videos."""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from dataserver.planning.job.fields import FrameRule, Sizing, VideoSizing
from dataserver.planning.stream.video_frames import frame_groups
from dataserver.video.decoding import VIDEO_VERSION, FrameGrid, VideoShape, decode_frames
from dataserver.video.header import read_video_header

_CLIPS: Final = Path(__file__).with_name("reference_clips")
"""Of six frames each."""
_SIZING: Final = Sizing.model_construct(patch=8, merge=1)
_VIDEO: Final = VideoSizing.model_construct(rule=FrameRule.UNIFORM, max_frames=5)
_SIDES: Final = (8, 4)
"""Patches of a side of frames that are not scaled, and of frames that are."""


@functools.cache
def video_digest() -> str:
    """Return SHA-256, hexadecimal, of the patches that this installation makes of a small built-in set.

    Servers whose FFmpeg would give other values differ in it.
    """
    digest = hashlib.sha256(f"disttrain video {VIDEO_VERSION}\n".encode())
    for data in built_in_videos():
        header = read_video_header(data)
        shape = VideoShape(header.frames, header.microseconds, header.width, header.height, header.orientation)
        for side in _SIDES:
            grid = FrameGrid(frame_groups(shape.frames, shape.microseconds, _VIDEO), side, side)
            out = np.empty((grid.groups * side**2, 2 * 3 * _SIZING.patch**2), np.uint8)
            valid = decode_frames(data, shape, grid, _SIZING, _VIDEO, out)
            digest.update(b"valid\n" if valid else b"invalid\n")
            digest.update(out.tobytes())
    return digest.hexdigest()


def built_in_videos() -> Iterator[bytes]:
    """Yield a video of each codec."""
    for name in ("h264.mp4", "hevc.mp4", "vp8.webm", "vp9.webm", "av1.mp4", "mpeg4.mov"):
        yield (_CLIPS / name).read_bytes()
