"""Makes demo shards in img2dataset layout, offline, from the photographs that scikit-image carries.

Random crops of random sizes and JPEG qualities, so that sizes and aspect ratios are skewed as in LAION (log-normal;
width p10 / p50 / p90 about 256 / 512 / 1200), with captions of 2 to 300 words. Same arguments, same bytes.
"""

import argparse
import hashlib
import io
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import skimage
import webdataset
from PIL import Image

PHOTOGRAPHS = (
    "astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "motorcycle_left.png",
    "motorcycle_right.png", "retina.jpg", "rocket.jpg", "camera.png", "coins.png", "brick.png", "grass.png",
)  # fmt: skip
SUBJECTS = (
    "an astronaut", "a cat", "a cup of coffee", "distant galaxies", "a motorcycle",
    "a parked motorcycle", "the back of an eye", "a rocket", "a photographer", "old coins", "a brick wall", "a lawn",
)  # fmt: skip
WORDS = (
    "close up in soft morning light with a blurred background seen from above near the old town during summer holiday "
    "original print framed poster free shipping high resolution stock photo by unknown artist detail texture pattern"
).split()

SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("caption", "url", "key", "status", "error_message")]
    + [(name, pa.int32()) for name in ("width", "height", "original_width", "original_height")]
    + [(name, pa.string()) for name in ("exif", "sha256")]
)


MEDIAN_WIDTH = 512


def draw_size(rng: np.random.Generator, median: int) -> tuple[int, int]:
    """Width and height in pixels, log-normal around the median width, aspect ratio around 4:3."""
    width = np.clip(median * np.exp(rng.normal(0.05, 0.6)), 96, 3000)
    height = np.clip(width / np.exp(rng.normal(0.2, 0.35)), 96, 3000)
    return int(width), int(height)


def draw_caption(rng: np.random.Generator, subject: str) -> str:
    """From 2 to 300 words, log-normally many."""
    count = int(np.clip(np.exp(rng.normal(2.4, 0.9)), 2, 300))
    words = subject.split() + [WORDS[i] for i in rng.integers(0, len(WORDS), max(0, count - 2))]
    return " ".join(words[: max(2, count)])


def draw_jpeg(rng: np.random.Generator, photograph: Image.Image, size: tuple[int, int]) -> bytes:
    """A random crop with the wanted aspect ratio, scaled to the wanted size."""
    width, height = size
    scale = min(photograph.width / width, photograph.height / height) * rng.uniform(0.4, 1.0)
    crop_width, crop_height = max(8, int(width * scale)), max(8, int(height * scale))
    left = int(rng.integers(0, photograph.width - crop_width + 1))
    top = int(rng.integers(0, photograph.height - crop_height + 1))
    crop = photograph.resize(size, Image.Resampling.BICUBIC, (left, top, left + crop_width, top + crop_height))
    buffer = io.BytesIO()
    crop.save(buffer, "JPEG", quality=int(rng.integers(60, 96)))
    return buffer.getvalue()


def make_sample(
    rng: np.random.Generator, key: str, photographs: list[Image.Image], median: int
) -> tuple[bytes, dict[str, Any]]:
    """One photograph as JPEG, and its metadata row."""
    which = int(rng.integers(len(photographs)))
    width, height = draw_size(rng, median)
    image = draw_jpeg(rng, photographs[which], (width, height))
    row = {
        "caption": draw_caption(rng, SUBJECTS[which]),
        "url": f"scikit-image/{PHOTOGRAPHS[which]}",
        "key": key,
        "status": "success",
        "error_message": None,
        "width": width,
        "height": height,
        "original_width": width,
        "original_height": height,
        "exif": "{}",
        "sha256": hashlib.sha256(image).hexdigest(),
    }
    return image, row


@cache
def read_photographs() -> list[Image.Image]:
    """All of them, once in each process."""
    source = Path(skimage.__file__).parent / "data"
    return [Image.open(source / name).convert("RGB") for name in PHOTOGRAPHS]


def write_shard(folder: Path, shard: int, count: int, seed: int, median: int) -> None:
    """One tar, its parquet and its statistics, as img2dataset writes them."""
    photographs = read_photographs()
    rng = np.random.default_rng((seed, shard))
    rows = []
    with webdataset.TarWriter(str(folder / f"{shard:05d}.tar"), mtime=0) as tar:
        for number in range(count):
            key = f"{shard:05d}{number:04d}"
            image, row = make_sample(rng, key, photographs, median)
            tar.write({"__key__": key, "jpg": image, "json": json.dumps(row, indent=4), "txt": row["caption"]})
            rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{shard:05d}.parquet")
    stats = {"count": count, "successes": count, "failed_to_download": 0, "failed_to_resize": 0}
    (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats, indent=4))


def make_shards(
    folder: Path,
    num_samples: int = 600,
    num_shards: int = 6,
    seed: int = 0,
    median: int = MEDIAN_WIDTH,
    workers: int = 1,
) -> Path:
    """Write `num_samples` over `num_shards` shards below `folder`, of images with that median width in pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = [num_samples // num_shards + (shard < num_samples % num_shards) for shard in range(num_shards)]
    if workers == 1:
        for shard, count in enumerate(counts):
            print(f"shard {shard + 1} of {num_shards}", flush=True)
            write_shard(folder, shard, count, seed, median)
        return folder
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        made = [pool.submit(write_shard, folder, shard, count, seed, median) for shard, count in enumerate(counts)]
        for shard, future in enumerate(made):
            future.result()
            print(f"shard {shard + 1} of {num_shards}", flush=True)
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the shards go")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--median", type=int, default=MEDIAN_WIDTH, help="width of an image in pixels (default 512)")
    parser.add_argument("--workers", type=int, default=1, help="processes that make them (default 1)")
    given = parser.parse_args()
    make_shards(given.folder, given.samples, given.shards, given.seed, given.median, given.workers)
    print(f"{given.samples} samples in {given.shards} shards below {given.folder}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
