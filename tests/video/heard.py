"""Tars with videos that have sound beside videos that have none, images and clips."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from audio.clips import clip, sound
from shards import make_image, write_tar
from video.clips import video
from video.sounds import video_with_sound

from dataserver.assembly import load_tokenizer
from dataserver.dataset import IndexRules, MediaMembers, build_index, count_tokens

HEARD = IndexRules(audio=MediaMembers.SERVE, video=MediaMembers.SERVE, video_sound=MediaMembers.SERVE)


def members(count: int, shard: int) -> Iterator[tuple[str, bytes]]:
    """Samples in turn: a video with sound, one without beside an image, one beside a clip, a document."""
    random = np.random.default_rng(shard)
    for number in range(count):
        key, kind = f"{shard:02}{number:04}", number % 4
        name, ending = (("aac", "mp4"), ("opus", "webm"))[number % 2]
        tone = sound(float(random.uniform(0.2, 1.2)), 48_000, 1 + number % 2, seed=number)
        heard = video_with_sound(tone, name, frames=int(random.integers(1, 12)))
        if kind == 3:
            yield f"{key}.a.{ending}", heard
            yield f"{key}.b.jpg", make_image(random, 60, 40)
            texts, names = ["What is heard?", None, "And", None], [None, f"{key}.a.{ending}", None, f"{key}.b.jpg"]
            yield f"{key}.json", json.dumps({"texts": texts, "images": names}).encode()
            continue
        if kind == 1:
            yield f"{key}.jpg", make_image(random, 50, 70)
        yield f"{key}.{ending}", video("h264" if ending == "mp4" else "vp9", 5, seed=number) if kind == 1 else heard
        if kind == 2:
            yield f"{key}.second.flac", clip(0.4, "flac", seed=number)
        yield f"{key}.txt", f"a text of sample {number}".encode()


def write_heard(folder: Path, count: int = 8) -> Path:
    """Write and index a shard of them."""
    write_tar(folder / "00.tar", members(count, 0))
    build_index(folder, workers=1, rules=HEARD)
    count_tokens(folder, load_tokenizer("bytes"))
    return folder
