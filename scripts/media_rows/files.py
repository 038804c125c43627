"""Clips and videos that are drawn, and what an index and a plan say of them."""

import io
import tarfile
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple

import av
import numpy as np
import soundfile
from numpy.typing import NDArray

from dataserver.assembly.decoders import DECODERS, Item
from dataserver.dataset import Dataset, ImageRef, IndexRules, MediaMembers, build_index
from dataserver.planning.job.fields import Sizing, served_frames
from dataserver.planning.stream.item_sizes import VideoLengths, audio_sizing, item_grids, video_sizing

RULES: Final = IndexRules(audio=MediaMembers.SERVE, video=MediaMembers.SERVE)
HEARD: Final = IndexRules(audio=MediaMembers.SERVE, video=MediaMembers.SERVE, video_sound=MediaMembers.SERVE)
"""Rules that also make a clip of the sound of each video."""
Array = NDArray[Any]


class Stored(NamedTuple):
    """A clip or a video, with what an index and a plan say of it."""

    data: bytes
    ref: ImageRef
    item: Item
    rows: int
    """Rows that its tensor has."""

    def decode(self, sizing: Sizing) -> Array:
        """Decode the content as servers do."""
        audio, video = audio_sizing(sizing), video_sizing(sizing)
        shape, kind = (self.rows, audio.bins), np.float32
        if not self.ref.is_audio:
            shape, kind = (self.rows, video.temporal_patch * sizing.patch**2 * 3), np.uint8  # type: ignore[assignment]
        out = np.empty(shape, kind)
        if not DECODERS[self.ref.modality](self.data, self.ref, self.item, sizing, out):
            raise RuntimeError("a file of the benchmark is not usable")
        return out


def draw_sound(random: np.random.Generator, seconds: float, rate: int, channels: int) -> NDArray[np.float32]:
    """A tone that rises, with noise. float32 [samples, channels]."""
    times = np.arange(int(seconds * rate)) / rate
    tone = 0.3 * np.sin(2 * np.pi * float(random.uniform(100, 900)) * times * (1 + 0.05 * times))
    return (tone[:, None] + 0.02 * random.standard_normal((len(times), channels))).astype(np.float32)


def draw_clip(random: np.random.Generator, seconds: float, rate: int, channels: int, container: str) -> bytes:
    """A file of such a sound."""
    file = io.BytesIO()
    subtype = {"FLAC": "PCM_16", "MP3": "MPEG_LAYER_III", "OGG": "VORBIS"}[container]
    sound = draw_sound(random, seconds, rate, channels)
    soundfile.write(file, sound, rate, format=container, subtype=subtype)
    return file.getvalue()


def draw_video(
    random: np.random.Generator,
    seconds: int,
    side: tuple[int, int],
    codec: str,
    key_every: int,
    sound: tuple[str, int] | None = None,
) -> bytes:
    """Moving colours, 30 frames a second; by option with sound of 48 kHz, given by its codec and channels."""
    file, (width, height) = io.BytesIO(), side
    y, x = np.mgrid[0:height, 0:width]
    speed = int(random.integers(2, 9))
    with av.open(file, "w", format="mp4" if codec == "libx264" else "webm") as out:
        stream: Any = out.add_stream(codec, rate=30, options={"deadline": "realtime", "cpu-used": "8"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = key_every
        packets = [] if sound is None else _sound_packets(out, draw_sound(random, seconds, 48_000, sound[1]), sound[0])
        for n in range(30 * seconds):
            parts = x + n * speed, y * 2 + n, (x * y >> 6) + 3 * n
            pixels = (np.stack(parts, axis=-1) % 256).astype(np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                out.mux(packet)
        for packet in (*stream.encode(), *packets):
            out.mux(packet)
    return file.getvalue()


def _sound_packets(out: Any, sound: NDArray[np.float32], codec: str) -> list[Any]:
    """Encode a sound of 48 kHz for a container in which nothing is written yet."""
    layout = {1: "mono", 2: "stereo"}[sound.shape[1]]
    stream = out.add_stream(codec, rate=48_000, layout=layout)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound.T), format="fltp", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = 48_000, 0, Fraction(1, 48_000)
    changed = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=48_000)
    return [packet for part in (*changed.resample(frame), None) for packet in stream.encode(part)]


def write_shard(path: Path, files: Sequence[tuple[str, bytes]]) -> None:
    """A tar of samples, each of a file with this ending and a text."""
    with tarfile.open(path, "w") as tar:
        for n, (ending, data) in enumerate(files):
            for name, content in ((f"{n:04}.{ending}", data), (f"{n:04}.txt", b"text")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def stored(files: Sequence[tuple[str, bytes]], sizing: Sizing, *, heard: bool = False) -> list[Stored]:
    """Files as an index and a job see them; of videos that are `heard` their sounds."""
    with tempfile.TemporaryDirectory() as root:
        write_shard(Path(root) / "0.tar", files)
        build_index(Path(root), workers=1, rules=HEARD if heard else RULES)
        (shard,) = Dataset.open(Path(root)).shards
        refs = shard.images([(row, int(heard)) for row in range(len(files))])
    widths, heights = (np.array([getattr(ref, side) for ref in refs], np.int32) for side in ("width", "height"))
    modality = np.array([ref.modality for ref in refs], np.uint8)
    lengths = VideoLengths(
        np.array([ref.frames for ref in refs], np.int32), np.array([ref.microseconds for ref in refs], np.int64)
    )
    rows, columns, media = item_grids(np.arange(len(refs) + 1), widths, heights, modality, sizing, lengths=lengths)
    found = []
    for n, (_, data) in enumerate(files):
        depth = int(media["image_depths"][n])
        item = Item(int(rows[n]), int(columns[n]), (), depth=depth)
        count = int(rows[n]) * int(columns[n])
        if refs[n].is_audio:
            count = served_frames(int(columns[n]), audio_sizing(sizing))
        found.append(Stored(data, refs[n], item, count))
    return found
