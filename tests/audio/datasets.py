"""Tars with clips beside images."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from audio.clips import clip
from shards import make_image, write_tar

from dataserver.assembly import load_tokenizer
from dataserver.dataset import IndexRules, MediaMembers, build_index, count_tokens

FORMATS = ("wav", "flac", "mp3")
SERVED = IndexRules(audio=MediaMembers.SERVE)


def members(count: int, shard: int) -> Iterator[tuple[str, bytes]]:
    """Samples in turn: an image, a clip, both, two clips with an image, a document, and text alone never."""
    random = np.random.default_rng(shard)
    for number in range(count):
        key, kind = f"{shard:02}{number:04}", number % 5
        name = FORMATS[number % 3]
        seconds = float(random.uniform(0.05, 3))
        image = make_image(random, int(random.integers(30, 120)), int(random.integers(30, 120)))
        if kind == 4:
            yield f"{key}.a.{name}", clip(seconds, name, seed=number)
            yield f"{key}.b.jpg", image
            yield f"{key}.c.flac", clip(seconds / 2, "flac", 22_050, 2, seed=number + 1)
            texts = ["What is heard?", None, "And", None, None]
            images = [None, f"{key}.a.{name}", None, f"{key}.b.jpg", f"{key}.c.flac"]
            yield f"{key}.json", json.dumps({"texts": texts, "images": images}).encode()
            continue
        if kind != 1:
            yield f"{key}.jpg", image
        if kind:
            yield f"{key}.{name}", clip(seconds, name, seed=number)
        if kind == 3:
            yield f"{key}.second.wav", clip(seconds + 0.1, "wav", 8_000, seed=number + 2)
        yield f"{key}.txt", f"a text of sample {number}".encode()


def write_audio(folder: Path, shards: int = 2, count: int = 25) -> Path:
    """Write and index shards with clips."""
    for shard in range(shards):
        write_tar(folder / f"{shard:02}.tar", members(count, shard))
    build_index(folder, workers=1, rules=SERVED)
    count_tokens(folder, load_tokenizer("bytes"))
    return folder
