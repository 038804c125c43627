"""Videos with sound in any codec."""

import io
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from audio.clips import encoded, sound
from numpy.typing import NDArray

CODECS = {
    "aac": ("mp4", "aac"),
    "mp3": ("mp4", "libmp3lame"),
    "opus": ("webm", "libopus"),
    "vorbis": ("webm", ""),
    "aac-mkv": ("matroska", "aac"),
    "aac-ts": ("mpegts", "aac"),
    "mp3-ts": ("mpegts", "libmp3lame"),
    "ac3": ("mp4", "ac3"),
}
"""Container and encoder of sound, by a short name; PyAV has no encoder of Vorbis, so that is taken from an Ogg file."""
_PICTURES = {"mp4": "mpeg4", "webm": "libvpx", "matroska": "mpeg4", "mpegts": "mpeg4"}


def video_with_sound(
    samples: NDArray[np.float32] | None = None,
    name: str = "aac",
    rate: int = 48_000,
    *,
    frames: int = 4,
    at: Callable[[int], int] = lambda pts: pts,
    has_packets: bool = True,
) -> bytes:
    """A video of small frames, ten a second, with the sound of samples, float32 [samples, channels].

    Args:
        samples: by default half a second of a tone.
        name: of `CODECS`.
        rate: samples a second.
        frames: of pictures.
        at: the time of a packet of sound from that which its encoder gave it, in ticks of the container.
        has_packets: whether there is a packet of sound at all.
    """
    import av

    container, codec = CODECS[name]
    found = sound(0.5, rate) if samples is None else samples
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        pictures: Any = file.add_stream(_PICTURES[container], rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        stream, packets = _sound(file, found, codec, rate)
        for number in range(frames):
            picture = np.full((48, 64, 3), 20 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            file.mux(pictures.encode(frame))
        file.mux(pictures.encode(None))
        for packet in packets() if has_packets else ():
            packet.stream = stream
            packet.pts, packet.dts = at(packet.pts), at(packet.dts)
            file.mux(packet)
    return out.getvalue()


def _sound(file: Any, samples: NDArray[np.float32], codec: str, rate: int) -> tuple[Any, Callable[[], list[Any]]]:
    """A stream for sound, and what gives its packets once the file is begun."""
    import av

    channels = samples.shape[1]
    if not codec:
        source = av.open(io.BytesIO(encoded(samples, rate, "vorbis")))
        given = source.streams.audio[0]
        stream = file.add_stream_from_template(given)
        return stream, lambda: [packet for packet in source.demux(given) if packet.size]
    layout = {1: "mono", 2: "stereo"}[channels]
    stream = file.add_stream(codec, rate=rate, layout=layout)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    changed = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
    return stream, lambda: [packet for part in (*changed.resample(frame), None) for packet in stream.encode(part)]


def damaged(data: bytes) -> bytes:
    """The same video, with the bytes of its later packets of sound overwritten."""
    import av

    changed = bytearray(data)
    with av.open(io.BytesIO(data)) as file:
        packets = [(packet.pos, packet.size) for packet in file.demux(audio=0) if packet.size]
    for at, size in packets[len(packets) // 2 :]:
        changed[at : at + size] = bytes([0xA5, 0x3C] * size)[:size]
    return bytes(changed)
