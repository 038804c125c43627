"""What a video's headers and packets say of it. One frame is decoded: it shows that the others can be, and its turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dataserver.extras import pip_install
from dataserver.header_error import HeaderError
from dataserver.planning.job.fields import MICROSECONDS
from dataserver.video.formats import CODECS, DECODERS, VIDEO_FORMATS, VideoFormat, video_format_of
from dataserver.video.limits import (
    FIRST_PACKETS,
    MAX_FRAME_PIXELS,
    MAX_FRAME_SIDE,
    MAX_VIDEO_BYTES,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_PIXELS,
    MAX_VIDEO_SECONDS,
)

if TYPE_CHECKING:
    import av
    from av.container import InputContainer

    from dataserver.video.reading import StoredFrame

REMEDY: Final = pip_install("video")
"""What brings the library that this folder needs."""
_ORIENTATIONS: Final = {0: 1, 90: 8, -90: 6, 180: 3, -180: 3, 270: 6}
"""EXIF orientation for the angle by which frames are turned counterclockwise."""
TURNED: Final = (6, 8)
"""Orientations that swap width and height."""


class VideoHeaderError(HeaderError):
    """A video whose header cannot be used: `unreadable_header` or `video_too_large`."""


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What is known of a video before its frames are decoded."""

    format: str
    frames: int
    """Packets of frames that are shown, counted."""
    microseconds: int
    """Duration from the time of the first frame to the end of the last one, rounded."""
    width: int
    height: int
    """Pixels of a frame, upright."""
    orientation: int
    """EXIF's number for how stored frames are turned: 1, 3, 6 or 8."""


@dataclass(frozen=True, slots=True)
class Times:
    """When the frames of a video are shown, in ticks of its stream."""

    pts: list[int]
    """Time of each frame, ascending."""
    ticks: int
    """Ticks from the first frame to the end of the last one, at least 1."""


def require_video() -> None:
    """Raise ValueError, which names the command that helps, where the library for video is not installed."""
    try:
        import av
    except ImportError as error:
        raise ValueError(f"video needs PyAV (av), which cannot be imported ({error}); {REMEDY}") from error
    if missing := [name for name in CODECS if name not in av.codecs_available]:
        raise ValueError(
            f"video needs an FFmpeg that decodes {', '.join(missing)}, and that of av {av.__version__} does not: "
            "pip install --force-reinstall av (its wheels bring a whole one)"
        )


def read_video_header(data: bytes) -> VideoHeader:
    """Read the header of a video, the times of all of its packets, and its first frame.

    Raises:
        VideoHeaderError: it cannot be read, or is over the limits.
    """
    if len(data) > MAX_VIDEO_BYTES:
        raise VideoHeaderError("video_too_large", f"{len(data)} bytes, limit {MAX_VIDEO_BYTES}")
    from dataserver.video.reading import microseconds_of

    with open_video(data) as (name, container, stream):
        _check_frame(stream.width, stream.height)
        first, shown = list["StoredFrame"](), list[tuple[int, int]]()
        for stored in _limited(container, stream):
            if len(first) < FIRST_PACKETS:
                first.append(stored)
            shown.append((stored.pts, stored.duration))
        times = times_of(shown)
        microseconds = microseconds_of(times.ticks, stream)
        if microseconds > MAX_VIDEO_SECONDS * MICROSECONDS:
            seconds = microseconds // MICROSECONDS
            raise VideoHeaderError("video_too_large", f"its frames span {seconds} s, limit {MAX_VIDEO_SECONDS}")
        width, height, rotation = _first_frame(stream, first)
    _check_frame(width, height)
    if (num_pixels := width * height * len(times.pts)) > MAX_VIDEO_PIXELS:
        raise VideoHeaderError("video_too_large", f"frames of {num_pixels} pixels together, limit {MAX_VIDEO_PIXELS}")
    if rotation not in _ORIENTATIONS:
        raise VideoHeaderError("unreadable_header", f"it is turned by {rotation} degrees, not by a multiple of 90")
    orientation = _ORIENTATIONS[rotation]
    if orientation in TURNED:
        width, height = height, width
    return VideoHeader(name, len(times.pts), microseconds, width, height, orientation)


def times_of(shown: list[tuple[int, int]]) -> Times:
    """The times of a video's frames, from time and duration of each, which is 0 where nothing is said."""
    pts = sorted(time for time, _ in shown)
    span, last_duration = pts[-1] - pts[0], max(shown)[1]
    if last_duration <= 0:  # as long as the others on average
        last_duration = span // (len(pts) - 1) if len(pts) > 1 else 1
    return Times(pts, max(1, span + last_duration))


@contextmanager
def open_video(data: bytes) -> "Iterator[tuple[str, InputContainer, av.VideoStream]]":
    """Open a video; yields the format's name, the container, and the stream of video.

    Raises:
        VideoHeaderError: it is none of the formats, or its header is damaged; as well where what is read in the block
            raises what the library raises for hostile bytes.
    """
    from dataserver.video.reading import video_stream

    neither = f"neither {' nor '.join(known.title for known in VIDEO_FORMATS)}"
    with opened(data, DECODERS, VideoHeaderError, neither) as (found, container):
        stream = video_stream(container)
        if stream is None:
            raise VideoHeaderError("unreadable_header", f"{found.title}: it has no video")
        codec = "unknown" if stream.codec_context is None else stream.codec_context.name
        if codec not in DECODERS:
            detail = f"{found.title}: its codec is {codec}; {', '.join(CODECS)} are read"
            raise VideoHeaderError("unreadable_header", detail)
        yield found.name, container, stream


@contextmanager
def opened(
    data: bytes, decoders: Sequence[str], refusal: type[HeaderError], unknown: str
) -> "Iterator[tuple[VideoFormat, InputContainer]]":
    """Open a file as a video; yields its format and the container.

    Args:
        data: the file.
        decoders: those that may be tried.
        refusal: what to raise where it cannot be read, also of what the library raises in the block for hostile bytes.
        unknown: says that it is of none of the formats.
    """
    from dataserver.video.reading import ERRORS, open_container

    found = video_format_of(data)
    if found is None:
        raise refusal("unreadable_header", f"{unknown}: starts with {data[:8].hex()}")
    try:
        with open_container(data, found, decoders) as container:
            yield found, container
    except HeaderError:
        raise
    except ERRORS as error:
        raise refusal("unreadable_header", f"{found.title}: {error}") from error


def _limited(container: "InputContainer", stream: "av.VideoStream") -> "Iterator[StoredFrame]":
    """Yield the packets of a video that has some, and not too many."""
    from dataserver.video.reading import frames_of

    number = 0
    for number, stored in enumerate(frames_of(container, stream), 1):
        if number > MAX_VIDEO_FRAMES:
            raise VideoHeaderError("video_too_large", f"more than {MAX_VIDEO_FRAMES} frames")
        yield stored
    if not number:
        raise VideoHeaderError("unreadable_header", "it has no frames")


def _check_frame(width: int, height: int) -> None:
    if not (width and height):  # what FFmpeg refuses has no size either
        detail = f"it does not say how large its frames are, or they are over {MAX_FRAME_PIXELS} pixels"
        raise VideoHeaderError("unreadable_header", detail)
    if not (1 <= width <= MAX_FRAME_SIDE and 1 <= height <= MAX_FRAME_SIDE):
        raise VideoHeaderError("video_too_large", f"frames of {width} x {height}, limit {MAX_FRAME_SIDE} a side")
    if width * height > MAX_FRAME_PIXELS:
        raise VideoHeaderError("video_too_large", f"frames of {width * height} pixels, limit {MAX_FRAME_PIXELS}")


def _first_frame(stream: "av.VideoStream", first: "list[StoredFrame]") -> tuple[int, int, int]:
    """Width and height of the first frame as it is stored, and the angle by which it is turned."""
    from dataserver.video.reading import FrameDecoder

    decoder = FrameDecoder(stream)
    for packet in (*(stored.packet for stored in first), None):
        for frame in decoder.decode(packet):
            return frame.width, frame.height, int(frame.rotation)
    raise VideoHeaderError("unreadable_header", f"its first {len(first)} packets hold no frame that can be decoded")
