"""Limits on what is decoded, in bytes, seconds, frames and pixels as they are stored, never in time that it takes.

They are constants of the code and no settings: whether a video is valid is a pure function of its stored bytes, the
same on every server of a fleet.
"""

from typing import Final

MAX_VIDEO_BYTES: Final = 64 << 20
"""Most bytes that an encoded video may have."""
MAX_VIDEO_SECONDS: Final = 3600
MAX_VIDEO_FRAMES: Final = 1 << 18
"""Most frames, of an hour 72 a second: packets of a few bytes can be many."""
FIRST_PACKETS: Final = 256
"""Most packets that may come before a decoder's first frame, of video or of sound."""
MAX_FRAME_PIXELS: Final = 1 << 25
"""Most pixels of a frame, a little more than 8K has. A decoder holds some 20 frames, of at most 6 bytes a pixel."""
MAX_FRAME_SIDE: Final = 1 << 14
MAX_VIDEO_PIXELS: Final = 1 << 40
"""Most pixels of all frames together, an hour of 4K at 30 frames a second: frames in which nothing moves take no
bytes, and as long to decode as others."""
