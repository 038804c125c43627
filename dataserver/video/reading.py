"""FFmpeg behind PyAV: the packets of a video in memory, and its frames. Imported with the first video.

Nothing but the bytes that are given is read: the reader of the container is named, no protocol is allowed, and a file
that names another one is refused.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import av
import av.container
import av.error
import av.logging
import numpy as np
from av.stream import Disposition
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

from dataserver.planning.job.fields import MICROSECONDS
from dataserver.video.formats import VideoFormat
from dataserver.video.limits import MAX_FRAME_PIXELS

av.logging.set_level(None)
ERRORS: Final = (av.error.FFmpegError, OSError, EOFError, ValueError, ArithmeticError, IndexError, UnicodeError)
"""What the library raises for hostile bytes."""
_OPTIONS: Final = {
    "threads": "1",
    "max_pixels": str(MAX_FRAME_PIXELS),
    "protocol_whitelist": "none",
    "max_streams": "16",
}
_CONVERSION: Final = int(Interpolation.BILINEAR)
"""What FFmpeg converts with where it is not asked: chroma as it is stored. Exact rounding takes 60 times as long."""


def open_container(data: bytes, found: VideoFormat, decoders: Sequence[str]) -> av.container.InputContainer:
    """Open a video; `decoders` are those that may be tried to see what its streams are."""
    options = {**_OPTIONS, "codec_whitelist": ",".join(decoders)}
    return av.open(io.BytesIO(data), "r", found.container, options=options, metadata_errors="replace", io_open=_refuse)


def video_stream(container: av.container.InputContainer) -> av.VideoStream | None:
    """The first stream of video that is no picture of a cover; None where there is none."""
    return next((s for s in container.streams.video if not s.disposition & Disposition.attached_pic), None)


class StoredFrame(NamedTuple):
    """A packet with a frame that is shown."""

    packet: "av.Packet[av.VideoStream]"
    pts: int
    """When it is shown, in ticks of its stream."""
    duration: int
    """Ticks; 0 where nothing is said."""
    is_key: bool


def frames_of(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[StoredFrame]:
    """Yield the packets of the frames that are shown, as they are stored; ValueError where one has no time."""
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            if packet.pts is None:
                raise ValueError("a frame has no time")
            yield StoredFrame(packet, packet.pts, packet.duration or 0, packet.is_keyframe)


def microseconds_of(ticks: int, stream: av.VideoStream) -> int:
    """Ticks of a stream as microseconds, rounded, at least 1."""
    if stream.time_base is None:
        raise ValueError("its frames have times without a unit")
    return max(1, round(ticks * MICROSECONDS * stream.time_base))


def _refuse(url: str, *_: Any) -> Any:
    raise OSError(f"the video names another file, {url[:80]!a}")


class FrameDecoder:
    """Decodes packets one after the other, on the thread that calls."""

    def __init__(self, stream: av.VideoStream) -> None:
        self._context = stream.codec_context
        self._context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
        self._context.thread_count = 1
        self._context.thread_type = "NONE"

    def restart(self) -> None:
        """Forget what was decoded; the next packet must be that of a key frame."""
        self._context.flush_buffers()

    def decode(self, packet: "av.Packet[av.VideoStream] | None") -> list[av.VideoFrame]:
        """The frames that come with a packet; with None those that are left."""
        return self._context.decode(packet)


def pixels_of(frame: av.VideoFrame) -> NDArray[np.uint8]:
    """RGB of a frame as it is stored. uint8 [height, width, 3], C-contiguous."""
    return np.ascontiguousarray(frame.to_ndarray(format="rgb24", interpolation=_CONVERSION))
