"""Tars with videos beside images."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from shards import make_image, write_tar
from video.clips import video

from dataserver.assembly import load_tokenizer
from dataserver.dataset import IndexRules, MediaMembers, build_index, count_tokens

SERVED = IndexRules(video=MediaMembers.SERVE)
SUFFIXES = {"h264": "mp4", "mpeg4": "mov", "vp9": "webm"}


def members(count: int, shard: int) -> Iterator[tuple[str, bytes]]:
    """Samples in turn: an image, a video, both, two videos with an image, a document."""
    random = np.random.default_rng(shard)
    for number in range(count):
        key, kind = f"{shard:02}{number:04}", number % 5
        name = [*SUFFIXES][number % 3]
        frames = int(random.integers(1, 30))
        shown = video(name, frames, width=int(random.integers(3, 8)) * 16, height=48, seed=number)
        image = make_image(random, int(random.integers(30, 120)), int(random.integers(30, 120)))
        if kind == 4:
            yield f"{key}.a.{SUFFIXES[name]}", shown
            yield f"{key}.b.jpg", image
            texts = ["What is seen?", None, "And", None]
            images = [None, f"{key}.a.{SUFFIXES[name]}", None, f"{key}.b.jpg"]
            yield f"{key}.json", json.dumps({"texts": texts, "images": images}).encode()
            continue
        if kind != 1:
            yield f"{key}.jpg", image
        if kind:
            yield f"{key}.{SUFFIXES[name]}", shown
        if kind == 3:
            yield f"{key}.second.mp4", video("h264", 3, seed=number)
        yield f"{key}.txt", f"a text of sample {number}".encode()


def write_videos(folder: Path, shards: int = 2, count: int = 20) -> Path:
    """Write and index shards with videos."""
    for shard in range(shards):
        write_tar(folder / f"{shard:02}.tar", members(count, shard))
    build_index(folder, workers=1, rules=SERVED)
    count_tokens(folder, load_tokenizer("bytes"))
    return folder
