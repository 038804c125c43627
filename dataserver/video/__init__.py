"""Encoded videos: bytes in, patches of sampled frames out. `formats` has a line for each format that is read.

PyAV, which brings FFmpeg, is the extra `video`, and imported where it is used.
"""

from dataserver.video.decoding import (
    FrameGrid,
    VideoShape,
    decode_first_frame,
    decode_frames,
    video_fault_of,
)
from dataserver.video.digest import video_digest
from dataserver.video.formats import TEXT_SUFFIXES, VIDEO_FORMAT_NAMES, VIDEO_SUFFIXES, is_text, video_format_of
from dataserver.video.header import VideoHeader, VideoHeaderError, read_video_header, require_video
from dataserver.video.limits import (
    MAX_FRAME_PIXELS,
    MAX_FRAME_SIDE,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_SECONDS,
)
from dataserver.video.sound import read_sound, read_sound_header, require_sound
from dataserver.video.sound_digest import sound_digest

__all__ = [
    "MAX_FRAME_PIXELS",
    "MAX_FRAME_SIDE",
    "MAX_VIDEO_FRAMES",
    "MAX_VIDEO_SECONDS",
    "TEXT_SUFFIXES",
    "VIDEO_FORMAT_NAMES",
    "VIDEO_SUFFIXES",
    "FrameGrid",
    "VideoHeader",
    "VideoHeaderError",
    "VideoShape",
    "decode_first_frame",
    "decode_frames",
    "is_text",
    "read_sound",
    "read_sound_header",
    "read_video_header",
    "require_sound",
    "require_video",
    "sound_digest",
    "video_digest",
    "video_fault_of",
    "video_format_of",
]
