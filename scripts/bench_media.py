#!/usr/bin/env python
"""Clips and videos beside loops that people write: CPU time per second of audio, and per frame of video.

Servers' own decoders run on one thread, from the bytes in memory to the rows of a tensor. Beside them, in turn and in
the same process, a loop over the same bytes with the same libraries: soundfile, the mean of the channels, soxr and the
same spectrogram; of the sound of a video PyAV and these; PyAV on one thread, decoding on to each sampled frame,
converting that one, Pillow's resize to the same grid, and the same order of patches. All is CPU time, shown as the
median of ratios of a round. The second set is held out: other lengths, rates, sizes and formats. transformers' feature
extractor, which fills every clip up to 30 seconds, stands beside clips for comparison; torchcodec beside all where it
can be imported. That wants FFmpeg's libraries under their own names: a folder of links to PyAV's (`av.libs`), named as
`libavcodec.so.62`, will do, with both folders in LD_LIBRARY_PATH. The exit code is 1 on a miss.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from benchmarks.rows import Row, report
from media_rows.files import Array, Stored, draw_clip, draw_video, stored
from media_rows.loops import loop_audio, loop_sound, loop_video, whisper_extractor
from media_rows.torchcodec_loops import torchcodec_audio, torchcodec_frames, why_not

from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.item_sizes import video_sizing
from dataserver.planning.stream.video_frames import sampled_frames

MOST: Final = 1.2
"""Most CPU time, in times of that of a serial loop."""
Work = Callable[[Stored, Sizing], object]
Hear = Callable[[Stored, Sizing], Array]


def cpu_s(work: Work, of: Sequence[Stored], sizing: Sizing) -> float:
    """CPU time of this process over all of some files."""
    began = time.process_time()
    for one in of:
        work(one, sizing)
    return time.process_time() - began


def compared(of: Sequence[Stored], sizing: Sizing, loop: Work, rounds: int) -> tuple[float, float]:
    """Median over rounds of the servers' time in that of a loop, and of the servers' own seconds."""
    ratios, own = [], []
    for number in range(rounds + 1):
        ours, theirs = cpu_s(Stored.decode, of, sizing), cpu_s(loop, of, sizing)
        if number:  # the first round loads libraries
            ratios.append(ours / theirs)
            own.append(ours)
    return statistics.median(ratios), statistics.median(own)


def audio_rows(of: Sequence[Stored], sizing: Sizing, what: str, rounds: int) -> list[Row]:
    """Decode clips both ways, and return the rows."""
    rows = _heard_rows(of, sizing, what, ("audio / soundfile + soxr", loop_audio), rounds)
    extractor = whisper_extractor()
    if extractor is not None:
        ratio, _ = compared(of, sizing, extractor, rounds)
        rows.append(Row(f"audio / the same with transformers' feature extractor, {what}", f"{ratio:.3f}", "", None))
    return rows


def sound_rows(of: Sequence[Stored], sizing: Sizing, what: str, rounds: int) -> list[Row]:
    """Rows of the sound of some videos."""
    return _heard_rows(of, sizing, what, ("sound of videos / PyAV + soxr", loop_sound), rounds)


def _heard_rows(of: Sequence[Stored], sizing: Sizing, what: str, beside: tuple[str, Hear], rounds: int) -> list[Row]:
    name, loop = beside
    for one in of:
        if not np.allclose(one.decode(sizing), loop(one, sizing), atol=1e-4):
            raise RuntimeError(f"the spectrograms of {what} differ")
    seconds = sum(one.ref.width / one.ref.height for one in of)
    ratio, own = compared(of, sizing, loop, rounds)
    rows = [Row(f"{name}, {what}", f"{ratio:.3f}", f"<= {MOST}", ratio <= MOST)]
    rows.append(Row(f"ms of CPU time a second of it, {what}", f"{1e3 * own / seconds:.2f}", "", None))
    return [*rows, _torchcodec_row(of, sizing, f"the same / torchcodec, {what}", torchcodec_audio, rounds)]


def video_rows(of: Sequence[Stored], sizing: Sizing, what: str, rounds: int) -> list[Row]:
    """Decode videos both ways, and return the rows."""
    for one in of:
        differ = np.abs(one.decode(sizing).astype(int) - loop_video(one, sizing).astype(int)).mean()
        if differ > 4:
            raise RuntimeError(f"the frames of {what} differ by {differ:.1f} of 255 in the mean")
    frames = sum(sampled_frames(one.ref.frames, one.ref.microseconds, video_sizing(sizing)) for one in of)
    ratio, own = compared(of, sizing, loop_video, rounds)
    rows = [Row(f"video / PyAV + Pillow, {what}", f"{ratio:.3f}", f"<= {MOST}", ratio <= MOST)]
    rows.append(Row(f"ms of CPU time a sampled frame, {what}", f"{1e3 * own / frames:.2f}", "", None))
    name = f"video with scaling / torchcodec's frames unscaled, {what}"
    return [*rows, _torchcodec_row(of, sizing, name, torchcodec_frames, rounds)]


def _torchcodec_row(of: Sequence[Stored], sizing: Sizing, name: str, loop: Work, rounds: int) -> Row:
    missing = why_not()
    if missing is not None:
        return Row(name, f"it cannot be imported ({missing[:70]})", "", None)
    return Row(name, f"{compared(of, sizing, loop, rounds)[0]:.3f}", "", None)


def _clip_rows(arguments: argparse.Namespace, sizing: Sizing) -> list[Row]:
    sets = (
        ("FLAC, stereo, 44.1 kHz, 4 to 28 s", (4, 28), 44_100, 2, "FLAC", "flac"),
        ("held out: MP3, mono, 22 kHz, 1 to 12 s", (1, 12), 22_050, 1, "MP3", "mp3"),
    )
    rows = list[Row]()
    for number, (what, between, rate, channels, container, ending) in enumerate(sets):
        random = np.random.default_rng(arguments.seed + number)
        lengths = random.uniform(*between, arguments.clips)
        clips = [(ending, draw_clip(random, float(s), rate, channels, container)) for s in lengths]
        rows += audio_rows(stored(clips, sizing), sizing, what, arguments.rounds)
    return rows


def _video_rows(arguments: argparse.Namespace, sizing: Sizing) -> list[Row]:
    sets = (
        ("H.264 640x360, a key frame in 60, 6 s", 6, (640, 360), "libx264", 60, "mp4"),
        ("held out: VP9 426x240, a key frame in 120, 9 s", 9, (426, 240), "libvpx-vp9", 120, "webm"),
    )
    rows = list[Row]()
    for number, (what, seconds, side, codec, key_every, ending) in enumerate(sets):
        random = np.random.default_rng(arguments.seed + 10 + number)
        videos = [(ending, draw_video(random, seconds, side, codec, key_every)) for _ in range(arguments.videos)]
        rows += video_rows(stored(videos, sizing), sizing, what, arguments.rounds)
    return rows


def _sound_rows(arguments: argparse.Namespace, sizing: Sizing) -> list[Row]:
    sets = (
        ("AAC, stereo, beside H.264 426x240, 12 s", 12, (426, 240), "libx264", ("aac", 2), "mp4"),
        ("held out: Opus, mono, beside VP9 320x180, 7 s", 7, (320, 180), "libvpx-vp9", ("libopus", 1), "webm"),
    )
    rows = list[Row]()
    for number, (what, seconds, side, codec, sound, ending) in enumerate(sets):
        random = np.random.default_rng(arguments.seed + 20 + number)
        videos = [(ending, draw_video(random, seconds, side, codec, 60, sound)) for _ in range(arguments.videos)]
        rows += sound_rows(stored(videos, sizing, heard=True), sizing, what, arguments.rounds)
    return rows


PARTS: Final = {"clips": _clip_rows, "videos": _video_rows, "sounds": _sound_rows}


def main() -> int:
    """Measure all parts, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="part to measure")
    parser.add_argument("--clips", type=int, default=12, help="of each set (default 12)")
    parser.add_argument("--videos", type=int, default=3, help="of each set (default 3)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chosen = [PARTS[arguments.only]] if arguments.only else PARTS.values()
    return report(row for part in chosen for row in part(arguments, Sizing()))


if __name__ == "__main__":
    sys.exit(main())
