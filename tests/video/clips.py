"""Videos of moving colours in any format."""

import io
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMATS = {
    "h264": ("mp4", "libx264", {"x264-params": "log=0"}),
    "mpeg4": ("mov", "mpeg4", {}),
    "vp8": ("webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "8"}),
    "vp9": ("webm", "libvpx-vp9", {}),
    "mkv": ("matroska", "libx264", {"x264-params": "log=0"}),
    "fragmented": ("mp4", "libx264", {"x264-params": "log=0"}),
    "ts": ("mpegts", "libx264", {"x264-params": "log=0"}),
}
"""Container, encoder and its options, by a short name."""


def picture(number: int, width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]: no two frames of a video alike."""
    y, x = np.mgrid[0:height, 0:width]
    parts = x * 4 + number * 16 + seed, y * 6 + number * 9, np.full_like(x, number * 20)
    return (np.stack(parts, axis=-1) % 256).astype(np.uint8)


def video(
    name: str = "h264",
    frames: int = 12,
    *,
    width: int = 64,
    height: int = 48,
    rate: int = 10,
    key_every: int = 5,
    between: int = 2,
    times: Sequence[int] | None = None,
    seed: int = 0,
    sound: bool = False,
) -> bytes:
    """An encoded video; `times` are those of its frames in milliseconds, `between` its frames that look ahead."""
    import av

    container, codec, options = FORMATS[name]
    flags = {"movflags": "frag_keyframe+empty_moov"} if name == "fragmented" else {}
    out = io.BytesIO()
    with av.open(out, "w", format=container, options=flags) as file:
        stream: Any = file.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        stream.codec_context.gop_size = key_every
        stream.codec_context.max_b_frames = between if codec == "libx264" else 0
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        audio: Any = (
            file.add_stream("aac" if container in ("mp4", "mov", "mpegts") else "libopus", rate=48_000)
            if sound
            else None
        )
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, width, height, seed), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, rate)
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        if audio is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 48_000), np.float32), format="fltp", layout="mono")
            silence.sample_rate = 48_000
            file.mux([*audio.encode(silence), *audio.encode(None)])
    return out.getvalue()


def all_frames(data: bytes) -> list[tuple[int, NDArray[np.uint8]]]:
    """Time and RGB of every frame, by a plain loop of PyAV over the whole video."""
    import av

    with av.open(io.BytesIO(data)) as file:
        return [(frame.pts, frame.to_ndarray(format="rgb24")) for frame in file.decode(video=0)]  # type: ignore[misc]


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(video(sys.argv[1]))
