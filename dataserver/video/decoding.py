"""From an encoded video to the patches of its sampled frames.

The rules of video version 1:

1. A format of `formats.py`, told by how the file begins; its first stream of video that is no cover. The numbers of its
   frames, their times and their size must be those in the index.
2. How many frames are read, `sampled_frames` says. They are spread evenly over the video: of n frames, frame i is the
   one that is shown i / n of the way from the first to the end of the last. Where all frames, 0 .. m - 1, are within
   half a frame of an even rate, that is frame floor(i x m / n), as transformers reads them, however times are rounded.
   With the rule `qwen3` it is `frame_number`; where frames are not at an even rate, the one that is shown when that
   frame would be.
3. A frame is decoded from the last key frame before it, or on from the one that was decoded before it, whichever is
   fewer. Where a packet turns out to hold no frame, the frame that is shown at its time counts.
4. RGB by FFmpeg, as the video's colours say; upright; scaled to its grid, as images are.
5. `temporal_patch` frames make a group; the last frame is repeated to fill the last one. A row holds the same patch of
   all frames of a group, one after the other.

A video is invalid where a sampled frame cannot be decoded.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dataserver.images import U8, ImageShape, write_scaled_patches
from dataserver.planning.job.fields import FrameRule, Sizing, VideoSizing
from dataserver.planning.stream.video_frames import frame_number, sampled_frames
from dataserver.video.header import TURNED, Times, VideoHeaderError, open_video, times_of
from dataserver.video.limits import MAX_VIDEO_BYTES

if TYPE_CHECKING:
    import av

    from dataserver.video.reading import StoredFrame

VIDEO_VERSION: Final = 1
"""Version of the rules above."""

logger = logging.getLogger(__name__)


class InvalidVideoError(Exception):
    """These bytes are not a usable video; never leaves this folder."""


class VideoShape(NamedTuple):
    """What the index says of a video."""

    frames: int
    microseconds: int
    width: int
    height: int
    """Pixels of a frame, upright."""
    orientation: int
    """EXIF's number for how stored frames are turned."""


class FrameGrid(NamedTuple):
    """What the plan says of it."""

    groups: int
    """Groups of `temporal_patch` frames in the video."""
    rows: int
    columns: int
    """Patches in a row of a frame."""


class _KeyFrames:
    """Where the packets of key frames are."""

    def __init__(self, stored: "list[StoredFrame]") -> None:
        keys = sorted((frame.pts, position) for position, frame in enumerate(stored) if frame.is_key)
        self._times = [time for time, _ in keys]
        self._positions = [*accumulate((position for _, position in keys), max)]

    def before(self, time: int) -> int:
        """The last packet from which the frame of a time can be decoded."""
        number = bisect_right(self._times, time)
        return self._positions[number - 1] if number else 0


def decode_frames(data: bytes, shape: VideoShape, grid: FrameGrid, sizing: Sizing, video: VideoSizing, out: U8) -> bool:
    """Decode a video into the patches of its sampled frames.

    Args:
        data: the encoded video.
        shape: what the index says of it.
        grid: what the plan says of it.
        sizing: side of a patch, and of a merge block; filter.
        video: which frames are read.
        out: uint8 [groups * rows * columns, temporal_patch * patch * patch * 3], C-contiguous, overwritten: a group
            after the other, each merge-block-major.

    Returns:
        True; or False, with zeros in `out`, where `data` is not a usable video: a pure function of the arguments.

    Raises:
        MemoryError: the machine, not the video, is at fault.
    """
    wanted = sampled_frames(shape.frames, shape.microseconds, video)
    patches, span = grid.rows * grid.columns, video.temporal_patch
    groups = out.reshape(grid.groups, patches, span, sizing.patch**2 * 3)
    frame = np.empty((patches, sizing.patch**2 * 3), np.uint8)
    image = ImageShape(shape.width, shape.height, shape.orientation, grid.rows, grid.columns)
    number = 0
    try:
        for pixels in _sampled(data, shape, wanted, video.rule):
            write_scaled_patches(pixels, image, sizing, frame)
            groups[number // span, :, number % span] = frame
            number += 1
    except InvalidVideoError as error:
        logger.debug("a video of %d bytes cannot be decoded: %s", len(data), error)
        out.fill(0)
        return False
    for left in range(number, grid.groups * span):
        groups[left // span, :, left % span] = frame
    return True


def decode_first_frame(data: bytes, shape: VideoShape, grid: tuple[int, int], sizing: Sizing, out: U8) -> str | None:
    """Decode the first frame of a video into patches; how long that takes does not depend on the others.

    Args:
        data: the encoded video.
        shape: what the index says of it.
        grid: rows and columns of patches.
        sizing: side of a patch, and of a merge block; filter.
        out: uint8 [rows * columns, patch * patch * 3], overwritten.

    Returns:
        None; or why the frame cannot be had, and then `out` has no meaning.

    Raises:
        MemoryError: the machine, not the video, is at fault.
    """
    image = ImageShape(shape.width, shape.height, shape.orientation, *grid)
    try:
        write_scaled_patches(next(_sampled(data, shape, 1)), image, sizing, out)
    except InvalidVideoError as error:
        return str(error)
    return None


def video_fault_of(data: bytes, shape: VideoShape) -> str | None:
    """Say why servers deliver a video as invalid; None where they deliver it.

    Decodes all frames: a job that reads fewer may find it valid.

    Raises:
        MemoryError: the machine, not the video, is at fault.
    """
    try:
        for _ in _sampled(data, shape, shape.frames):
            pass
    except InvalidVideoError as error:
        return str(error)
    return None


def is_even(times: Times) -> bool:
    """Whether every frame is shown within half a mean frame of when it would be at an even rate."""
    first, count, ticks = times.pts[0], len(times.pts), times.ticks
    return all((2 * (time - first) * count + ticks) // (2 * ticks) == n for n, time in enumerate(times.pts))


def frames_at(times: Times, wanted: int, rule: FrameRule = FrameRule.UNIFORM) -> list[int]:
    """The positions of so many frames among all, in the order in which they are shown; ascending, some repeated."""
    first, count = times.pts[0], len(times.pts)
    if is_even(times):
        return [frame_number(i, wanted, count, rule) for i in range(wanted)]
    ticks = (times.ticks * i // wanted for i in range(wanted))
    if rule is FrameRule.QWEN3:
        ticks = (times.ticks * frame_number(i, wanted, count, rule) // count for i in range(wanted))
    return [bisect_right(times.pts, first + after) - 1 for after in ticks]


def _sampled(data: bytes, shape: VideoShape, wanted: int, rule: FrameRule = FrameRule.UNIFORM) -> Iterator[U8]:
    """Yield the sampled frames of a video in order, RGB, as they are stored."""
    from dataserver.video.reading import frames_of, pixels_of

    if len(data) > MAX_VIDEO_BYTES:
        raise InvalidVideoError(f"{len(data)} bytes, limit {MAX_VIDEO_BYTES}")
    size = (shape.width, shape.height) if shape.orientation not in TURNED else (shape.height, shape.width)
    try:
        with open_video(data) as (_, container, stream):
            stored = [*frames_of(container, stream)]
            times = _times(stored, stream, shape)
            at = [times.pts[position] for position in frames_at(times, wanted, rule)]
            last: tuple[int, U8] | None = None
            for pts, frame in _frames_at(stored, stream, at):
                if last is None or last[0] != pts:
                    if (frame.width, frame.height) != size:
                        raise InvalidVideoError(f"a frame has {frame.width} x {frame.height} pixels, not {size}")
                    last = pts, pixels_of(frame)
                yield last[1]
    except VideoHeaderError as error:
        raise InvalidVideoError(str(error)) from error


def _times(stored: "list[StoredFrame]", stream: "av.VideoStream", shape: VideoShape) -> Times:
    """The times of a video's frames. Raises InvalidVideoError where they are not those in the index."""
    from dataserver.video.reading import microseconds_of

    if len(stored) != shape.frames:
        raise InvalidVideoError(f"it has {len(stored)} frames, and in the index {shape.frames}")
    times = times_of([(frame.pts, frame.duration) for frame in stored])
    microseconds = microseconds_of(times.ticks, stream)
    if microseconds != shape.microseconds:
        raise InvalidVideoError(f"it takes {microseconds} microseconds, and in the index {shape.microseconds}")
    return times


def _frames_at(
    stored: "list[StoredFrame]", stream: "av.VideoStream", at: list[int]
) -> "Iterator[tuple[int, av.VideoFrame]]":
    """Yield the frame that is shown at each time, ascending, with its own time."""
    from dataserver.video.reading import FrameDecoder

    decoder = FrameDecoder(stream)
    keys = _KeyFrames(stored)
    ready: list[tuple[int, av.VideoFrame]] = []
    shown: tuple[int, av.VideoFrame] | None = None
    following, is_at_end = 0, False
    for time in at:
        key = keys.before(time)
        if key > following:
            decoder.restart()
            ready, shown, following, is_at_end = [], None, key, False
        while True:
            while ready and ready[0][0] <= time:
                shown = ready.pop(0)
            if ready or is_at_end or (shown is not None and shown[0] == time):
                break
            packet = stored[following].packet if following < len(stored) else None
            following, is_at_end = following + 1, packet is None
            ready = [(frame.pts, frame) for frame in decoder.decode(packet) if frame.pts is not None]
        if shown is None:
            raise InvalidVideoError("a sampled frame cannot be decoded")
        yield shown
