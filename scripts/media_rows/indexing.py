"""Rows of indexing clips, videos and their sounds, beside a loop that reads the same shard with the same libraries."""

import hashlib
import io
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import av
import numpy as np
import soundfile
from benchmarks.calibration import slowdown
from benchmarks.rows import Row

from dataserver.dataset import IndexRules, build_index
from media_rows.files import HEARD, RULES, draw_clip, draw_video, write_shard


@dataclass(frozen=True, slots=True)
class Media:
    """A shard of files of one kind."""

    what: str
    ending: str
    draw: Callable[[np.random.Generator], bytes]
    look: Callable[[bytes], object]
    """What people's loops ask of each file."""
    files: int = 1_500
    """So many that what a shard costs beside its files is little, as with the shards that people write."""
    rules: IndexRules = RULES


def _told(data: bytes) -> object:
    return soundfile.info(io.BytesIO(data))


def _counted(data: bytes) -> object:
    """The length of an MP3, which its header need not tell."""
    with av.open(io.BytesIO(data), "r") as file:
        return [packet.duration for packet in file.demux(audio=0)]


def _seen(data: bytes) -> object:
    """The times of all frames, and the size of the first one."""
    with av.open(io.BytesIO(data), "r") as file:
        times = [packet.pts for packet in file.demux(video=0) if packet.size]
        file.seek(0)
        frame = next(file.decode(video=0))
        return times, frame.width, frame.height


def _seen_and_heard(data: bytes) -> object:
    """The same, and the times of the sound with the rate of its first frame."""
    with av.open(io.BytesIO(data), "r") as file:
        packets = [(packet.pts, packet.duration) for packet in file.demux(audio=0) if packet.size]
        file.seek(0)
        frame = next(file.decode(audio=0))
        return _seen(data), packets, frame.sample_rate


SHARDS: Final = (
    Media("FLAC, 2 to 10 s", "flac", lambda r: draw_clip(r, r.uniform(2, 10), 16_000, 1, "FLAC"), _told),
    Media("held out: MP3, 2 to 20 s", "mp3", lambda r: draw_clip(r, r.uniform(2, 20), 22_050, 1, "MP3"), _counted),
    Media("H.264, 4 s", "mp4", lambda r: draw_video(r, 4, (320, 240), "libx264", 60), _seen, 200),
    Media("held out: VP9, 6 s", "webm", lambda r: draw_video(r, 6, (192, 128), "libvpx-vp9", 90), _seen, 200),
    Media(
        "H.264 with AAC, 4 s",
        "mp4",
        lambda r: draw_video(r, 4, (320, 240), "libx264", 60, ("aac", 2)),
        _seen_and_heard,
        200,
        HEARD,
    ),
)


def media_rows(rounds: int, seed: int) -> list[Row]:
    """Rows of every shard; files of each are eight that are drawn, again and again."""
    return [row for number, media in enumerate(SHARDS) for row in _rows(media, rounds, seed + number)]


def _rows(media: Media, rounds: int, seed: int) -> list[Row]:
    random = np.random.default_rng(seed)
    drawn = [media.draw(random) for _ in range(8)]
    with tempfile.TemporaryDirectory() as root:
        tar = Path(root) / "0.tar"
        write_shard(tar, [(media.ending, drawn[n % len(drawn)]) for n in range(media.files)])
        index = tar.with_name("0.tar.index")

        def loop() -> None:
            with tar.open("rb") as file:
                hashlib.file_digest(file, "sha256")
            with tarfile.open(tar) as members:
                for member in members:
                    stored = members.extractfile(member)
                    data = b"" if stored is None else stored.read()
                    if member.name.endswith(media.ending):
                        media.look(data)

        def index_it() -> None:
            index.unlink(missing_ok=True)
            build_index(tar.parent, workers=1, rules=media.rules)

        times = {loop: list[float](), index_it: list[float]()}
        for number in range(rounds + 1):
            for work, found in times.items():
                began = time.process_time()
                work()
                if number:  # the first round loads libraries
                    found.append(time.process_time() - began)
    ratio = statistics.median(i / s for s, i in zip(times[loop], times[index_it], strict=True))
    each = statistics.median(times[index_it]) / media.files / slowdown()
    name = f"{media.what}, {statistics.mean(map(len, drawn)) / 1e3:.0f} KB"
    return [
        Row(f"indexing {name} / a loop over the shard", f"{ratio:.2f} x", "", None),
        Row("  CPU time of a sample", f"{1e3 * each:.2f} ms", "", None),
    ]
