#!/usr/bin/env python
"""Indexing beside what it cannot do without: reading a shard and hashing its bytes.

A shard in img2dataset layout, of images of some 60 KB as in LAION at 512 pixels, and a held-out variant of more,
smaller and more skewed samples. Then shards of clips, videos and videos with sound, beside a loop that hashes the
shard, and asks soundfile or PyAV for the length of each file. All is measured in turn in this process, in CPU time, so
that other work on the machine changes ratios little. The exit code is 1 on a miss.
"""

import argparse
import hashlib
import io
import json
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.calibration import slowdown
from benchmarks.rows import Row, report
from media_rows.indexing import media_rows
from PIL import Image

from dataserver.dataset import build_index

SAMPLES_PER_S: Final = 6_000
"""Samples that a core indexes in a second, at least."""
CAPTION: Final = "a photo of an old red boat on the river near two men and a dog in soft morning light"


@dataclass(frozen=True)
class Shard:
    """What one is made of."""

    samples: int
    image_bytes: int
    """Bytes of an image in the median."""
    sigma: float
    """Standard deviation of the logarithm of these bytes."""
    seed: int


def write_shard(path: Path, shard: Shard) -> None:
    """A tar with a header of PAX records before each member, as webdataset writes it, and its parquet."""
    rng = np.random.default_rng(shard.seed)
    images = [_jpeg(rng) for _ in range(64)]
    rows = []
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(shard.samples):
            image, width, height = images[number % len(images)]
            key = f"{0:05d}{number:04d}"
            row = {"caption": CAPTION, "key": key, "status": "success", "width": width, "height": height}
            row |= {"punsafe": float(rng.random()), "similarity": float(rng.random()), "exif": "{}", "url": f"x/{key}"}
            rows.append(row)
            size = max(len(image), int(shard.image_bytes * np.exp(rng.normal(-0.1, shard.sigma))))
            members = (("jpg", image.ljust(size, b"\0")), ("json", json.dumps(row).encode()), ("txt", CAPTION.encode()))
            for extension, content in members:
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size, info.pax_headers = len(content), {"mtime": "1763596800.5"}
                tar.addfile(info, io.BytesIO(content))
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))


def _jpeg(rng: np.random.Generator) -> tuple[bytes, int, int]:
    width, height = (int(side) for side in rng.integers(200, 900, 2))
    buffer = io.BytesIO()
    pixels = np.full((height, width, 3), rng.integers(0, 256), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", progressive=bool(rng.integers(0, 2)))
    return buffer.getvalue(), width, height


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def indexing_rows(folder: Path, shard: Shard, rounds: int) -> list[Row]:
    """Index one shard several times, and return the rows."""
    tar = folder / "00000.tar"
    write_shard(tar, shard)
    index = folder / "00000.tar.index"

    def hash_only() -> None:
        with tar.open("rb") as file:
            hashlib.file_digest(file, "sha256")

    def index_it() -> None:
        index.unlink(missing_ok=True)
        build_index(folder, workers=1)

    index_it()
    hashing, indexing, slow = [], [], []
    for _ in range(rounds):
        slow.append(slowdown())
        hashing.append(_cpu_s(hash_only))
        indexing.append(_cpu_s(index_it))
    rate = shard.samples / statistics.median(s / by for s, by in zip(indexing, slow, strict=True))
    ratio = statistics.median(i / h for i, h in zip(indexing, hashing, strict=True))
    size = tar.stat().st_size
    name = f"{shard.samples:,} samples of {size / shard.samples / 1e3:.0f} KB"
    return [
        Row(f"indexing {name}", f"{rate:,.0f} samples/s and core", f">= {SAMPLES_PER_S:,}", rate >= SAMPLES_PER_S),
        Row("its CPU time over that of reading and hashing alone", f"{ratio:.2f} x", "", None),
        Row("reading and hashing alone", f"{size / statistics.median(hashing) / 1e9:.2f} GB/s", "", None),
    ]


def main() -> int:
    """Measure indexing, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000, help="of the first shard (default 4,000)")
    parser.add_argument("--image-bytes", type=int, default=60_000, help="of its images, in the median (default 60,000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    samples, image_bytes, seed = arguments.samples, arguments.image_bytes, arguments.seed
    rows = []
    for shard in (Shard(samples, image_bytes, 0.5, seed), Shard(2 * samples, image_bytes // 3, 1.0, seed + 1)):
        with tempfile.TemporaryDirectory() as folder:
            rows += indexing_rows(Path(folder), shard, arguments.rounds)
    return report([*rows, *media_rows(arguments.rounds, seed)])


if __name__ == "__main__":
    sys.exit(main())
