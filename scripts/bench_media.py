#!/usr/bin/env python
"""Clips and videos beside loops that people write: CPU time per second of audio, and per frame of video.

Servers' own decoders run on one thread, from the bytes in memory to the rows of a tensor. Beside them, in turn and in
the same process, a loop over the same bytes with the same libraries: soundfile, the mean of the channels, soxr and the
same spectrogram; PyAV on one thread, decoding on to each sampled frame, converting that one, Pillow's resize to the
same grid, and the same order of patches. All is CPU time, shown as the median of ratios of a round. The second set is
held out: other lengths, rates, sizes and formats. torchcodec stands beside them where it can be imported; transformers'
feature extractor, which fills every clip up to 30 seconds, for comparison. The exit code is 1 on a miss.
"""

import argparse
import io
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import av
import numpy as np
import soundfile
import soxr
from benchmarks.rows import Row, report
from numpy.typing import NDArray
from PIL import Image

from dataserver.assembly.decoders import DECODERS, Item
from dataserver.audio.mel import log_mel
from dataserver.dataset import AudioMembers, Dataset, ImageRef, IndexRules, VideoMembers, build_index
from dataserver.planning.job.fields import HOP, SAMPLE_RATE, Sizing, sampled_frames, served_frames
from dataserver.planning.stream.item_sizes import VideoLengths, audio_sizing, item_grids, video_sizing

MOST: Final = 1.2
"""Of the CPU time of a serial loop."""
Array = NDArray[Any]


class Stored(NamedTuple):
    """A clip or a video, with what an index and a plan say of it."""

    data: bytes
    ref: ImageRef
    item: Item
    rows: int
    """Of its tensor."""

    def decode(self, sizing: Sizing) -> Array:
        """As servers do."""
        audio, video = audio_sizing(sizing), video_sizing(sizing)
        shape, kind = (self.rows, audio.bins), np.float32
        if not self.ref.is_audio:
            shape, kind = (self.rows, video.temporal_patch * sizing.patch**2 * 3), np.uint8  # type: ignore[assignment]
        out = np.empty(shape, kind)
        if not DECODERS[self.ref.modality](self.data, self.ref, self.item, sizing, out):
            raise RuntimeError("a file of the benchmark is not usable")
        return out


def draw_clip(random: np.random.Generator, seconds: float, rate: int, channels: int, container: str) -> bytes:
    """A tone that rises, with noise."""
    times = np.arange(int(seconds * rate)) / rate
    tone = 0.3 * np.sin(2 * np.pi * float(random.uniform(100, 900)) * times * (1 + 0.05 * times))
    sound = tone[:, None] + 0.02 * random.standard_normal((len(times), channels))
    file = io.BytesIO()
    subtype = {"FLAC": "PCM_16", "MP3": "MPEG_LAYER_III", "OGG": "VORBIS"}[container]
    soundfile.write(file, sound.astype(np.float32), rate, format=container, subtype=subtype)
    return file.getvalue()


def draw_video(random: np.random.Generator, seconds: int, side: tuple[int, int], codec: str, key_every: int) -> bytes:
    """Moving colours, 30 frames a second."""
    file, (width, height) = io.BytesIO(), side
    y, x = np.mgrid[0:height, 0:width]
    speed = int(random.integers(2, 9))
    with av.open(file, "w", format="mp4" if codec == "libx264" else "webm") as out:
        stream: Any = out.add_stream(codec, rate=30, options={"deadline": "realtime", "cpu-used": "8"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = key_every
        for n in range(30 * seconds):
            parts = x + n * speed, y * 2 + n, (x * y >> 6) + 3 * n
            pixels = (np.stack(parts, axis=-1) % 256).astype(np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    return file.getvalue()


def stored(files: Sequence[tuple[str, bytes]], sizing: Sizing) -> list[Stored]:
    """Files as an index and a job see them."""
    with tempfile.TemporaryDirectory() as root:
        with tarfile.open(Path(root) / "0.tar", "w") as tar:
            for n, (ending, data) in enumerate(files):
                for name, content in ((f"{n:04}.{ending}", data), (f"{n:04}.txt", b"text")):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        rules = IndexRules(audio=AudioMembers.SERVE, video=VideoMembers.SERVE)
        build_index(Path(root), workers=1, rules=rules)
        (shard,) = Dataset.open(Path(root)).shards
        refs = shard.images([(row, 0) for row in range(len(files))])
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


def loop_audio(one: Stored, sizing: Sizing) -> Array:
    """A clip by soundfile, soxr and the same spectrogram."""
    audio = audio_sizing(sizing)
    with soundfile.SoundFile(io.BytesIO(one.data)) as file:
        sound = file.read(audio.max_seconds * file.samplerate, dtype="float32", always_2d=True)
        mono = soxr.resample(sound.mean(axis=1), file.samplerate, SAMPLE_RATE, quality="VHQ")
    return log_mel(mono, one.rows, audio.max_frames * HOP, audio.bins)


def loop_video(one: Stored, sizing: Sizing) -> Array:
    """A video by PyAV and Pillow, decoding on from frame to frame."""
    video, ref = video_sizing(sizing), one.ref
    count = sampled_frames(ref.frames, ref.microseconds, video)
    wanted = [n * ref.frames // count for n in range(count)]
    groups, rows, columns = one.item.depth, one.item.rows // one.item.depth, one.item.columns
    side, merge, span = sizing.patch, sizing.merge, video.temporal_patch
    taken, pixels = iter(wanted), list[Array]()
    following: int | None = next(taken)
    with av.open(io.BytesIO(one.data), "r") as file:
        stream = file.streams.video[0]
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(file.decode(stream)):
            if number == following:
                size = (columns * side, rows * side)
                scaled = Image.fromarray(frame.to_ndarray(format="rgb24")).resize(size, Image.Resampling.BICUBIC)
                pixels.append(np.asarray(scaled))
                following = next(taken, None)
            if following is None:
                break
    pixels += [pixels[-1]] * (groups * span - len(pixels))
    cells = np.stack(pixels).reshape(groups, span, rows // merge, merge, side, columns // merge, merge, side, 3)
    return np.ascontiguousarray(cells.transpose(0, 2, 5, 3, 6, 1, 4, 7, 8)).reshape(one.rows, -1)


def torchcodec_decoder() -> Callable[[Stored, Sizing], object] | str:
    """What decodes the same frames by torchcodec, or why it cannot be imported."""
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def decode(one: Stored, sizing: Sizing) -> object:
        count = sampled_frames(one.ref.frames, one.ref.microseconds, video_sizing(sizing))
        decoder = VideoDecoder(one.data, num_ffmpeg_threads=1, seek_mode="exact")
        return decoder.get_frames_at([n * one.ref.frames // count for n in range(count)]).data

    return decode


def whisper_extractor() -> Callable[[Stored, Sizing], object] | None:
    """What makes spectrograms as transformers does, behind the same decoding; None where it is not installed."""
    try:
        from transformers import WhisperFeatureExtractor
    except ImportError:
        return None
    make: Any = WhisperFeatureExtractor
    made: dict[int, Any] = {}

    def extract(one: Stored, sizing: Sizing) -> object:
        bins = audio_sizing(sizing).bins
        extractor = made.get(bins) or made.setdefault(bins, make(feature_size=bins))
        with soundfile.SoundFile(io.BytesIO(one.data)) as file:
            sound = file.read(audio_sizing(sizing).max_seconds * file.samplerate, dtype="float32", always_2d=True)
            mono = soxr.resample(sound.mean(axis=1), file.samplerate, SAMPLE_RATE, quality="VHQ")
        return extractor(mono, sampling_rate=SAMPLE_RATE, return_tensors="np")

    return extract


def cpu_s(work: Callable[[Stored, Sizing], object], of: Sequence[Stored], sizing: Sizing) -> float:
    """CPU time of this process over all of some files."""
    began = time.process_time()
    for one in of:
        work(one, sizing)
    return time.process_time() - began


def compared(of: Sequence[Stored], sizing: Sizing, loop: Callable[[Stored, Sizing], object], rounds: int) -> Any:
    """Median over rounds of the servers' time in that of a loop, and of the servers' own seconds."""
    ratios, own = [], []
    for number in range(rounds + 1):
        ours, theirs = cpu_s(Stored.decode, of, sizing), cpu_s(loop, of, sizing)
        if number:  # the first round loads libraries
            ratios.append(ours / theirs)
            own.append(ours)
    return statistics.median(ratios), statistics.median(own)


def audio_rows(of: Sequence[Stored], sizing: Sizing, what: str, rounds: int) -> list[Row]:
    """Rows of some clips."""
    for one in of:
        if not np.allclose(one.decode(sizing), loop_audio(one, sizing), atol=1e-4):
            raise RuntimeError(f"the spectrograms of {what} differ")
    seconds = sum(one.ref.width / one.ref.height for one in of)
    ratio, own = compared(of, sizing, loop_audio, rounds)
    rows = [Row(f"audio / soundfile + soxr, {what}", f"{ratio:.3f}", f"<= {MOST}", ratio <= MOST)]
    rows.append(Row(f"ms of CPU time a second of audio, {what}", f"{1e3 * own / seconds:.2f}", "", None))
    extractor = whisper_extractor()
    if extractor is not None:
        ratio, _ = compared(of, sizing, extractor, rounds)
        rows.append(Row(f"audio / the same with transformers' feature extractor, {what}", f"{ratio:.3f}", "", None))
    return rows


def video_rows(of: Sequence[Stored], sizing: Sizing, what: str, rounds: int) -> list[Row]:
    """Rows of some videos."""
    for one in of:
        differ = np.abs(one.decode(sizing).astype(int) - loop_video(one, sizing).astype(int)).mean()
        if differ > 4:
            raise RuntimeError(f"the frames of {what} differ by {differ:.1f} of 255 in the mean")
    frames = sum(sampled_frames(one.ref.frames, one.ref.microseconds, video_sizing(sizing)) for one in of)
    ratio, own = compared(of, sizing, loop_video, rounds)
    rows = [Row(f"video / PyAV + Pillow, {what}", f"{ratio:.3f}", f"<= {MOST}", ratio <= MOST)]
    rows.append(Row(f"ms of CPU time a sampled frame, {what}", f"{1e3 * own / frames:.2f}", "", None))
    decoder = torchcodec_decoder()
    if isinstance(decoder, str):
        rows.append(Row(f"video / torchcodec, {what}", f"it cannot be imported ({decoder[:70]})", "", None))
    else:
        ratio, _ = compared(of, sizing, decoder, rounds)
        rows.append(Row(f"video with scaling / torchcodec's frames unscaled, {what}", f"{ratio:.3f}", "", None))
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=12, help="of each set (default 12)")
    parser.add_argument("--videos", type=int, default=3, help="of each set (default 3)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizing, rows = Sizing(), list[Row]()
    sets = (
        ("FLAC, stereo, 44.1 kHz, 4 to 28 s", (4, 28), 44_100, 2, "FLAC", "flac"),
        ("held out: MP3, mono, 22 kHz, 1 to 12 s", (1, 12), 22_050, 1, "MP3", "mp3"),
    )
    for number, (what, between, rate, channels, container, ending) in enumerate(sets):
        random = np.random.default_rng(arguments.seed + number)
        lengths = random.uniform(*between, arguments.clips)
        clips = [(ending, draw_clip(random, float(s), rate, channels, container)) for s in lengths]
        rows += audio_rows(stored(clips, sizing), sizing, what, arguments.rounds)
    shown = (
        ("H.264 640x360, a key frame in 60, 6 s", 6, (640, 360), "libx264", 60, "mp4"),
        ("held out: VP9 426x240, a key frame in 120, 9 s", 9, (426, 240), "libvpx-vp9", 120, "webm"),
    )
    for number, (what, seconds, side, codec, key_every, ending) in enumerate(shown):
        random = np.random.default_rng(arguments.seed + 10 + number)
        videos = [(ending, draw_video(random, seconds, side, codec, key_every)) for _ in range(arguments.videos)]
        rows += video_rows(stored(videos, sizing), sizing, what, arguments.rounds)
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
