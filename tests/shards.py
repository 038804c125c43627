"""Small seeded shards in the layout that img2dataset writes, for every part of the suite.

Import it as `from shards import write_pairs`: pytest puts `tests/` on the path. Same arguments, same bytes.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dataserver.dataset import Dataset, build_index

WORDS = [
    "a", "the", "of", "photo", "red", "blue", "old", "small", "dog", "cat",
    "street", "house", "tree", "river", "boat", "two", "men", "child", "plays", "runs",
]  # fmt: skip

Member = tuple[str, bytes]


def make_image(rng: np.random.Generator, width: int, height: int, image_format: str = "JPEG") -> bytes:
    """Encode a gradient with coarse noise, `width` x `height` RGB; quality 60..95 for the lossy formats."""
    ys, xs = np.mgrid[0:height, 0:width]
    base = rng.integers(0, 256, size=(3, 3))
    grid = [base[c, 0] + base[c, 1] * xs / width - base[c, 2] * ys / height for c in range(3)]
    noise = rng.integers(0, 40, size=(height // 8 + 1, width // 8 + 1, 3)).repeat(8, 0).repeat(8, 1)
    pixels = np.clip(np.stack(grid, -1) + noise[:height, :width], 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    options = {} if image_format == "PNG" else {"quality": int(rng.integers(60, 96))}
    Image.fromarray(pixels).save(buffer, format=image_format, **options)
    return buffer.getvalue()


def draw_size(rng: np.random.Generator, median: int = 96, limit: int = 512) -> tuple[int, int]:
    """Draw (width, height) from a log-normal width and aspect ratio, sides from 16 to `limit`."""
    width = median * float(np.exp(rng.normal(0.0, 0.6)))
    height = width / float(np.exp(rng.normal(0.15, 0.35)))
    return int(np.clip(width, 16, limit)), int(np.clip(height, 16, limit))


def draw_caption(rng: np.random.Generator, median_words: int = 10) -> str:
    """Draw 1..300 words, log-normally many."""
    count = int(np.clip(median_words * np.exp(rng.normal(0.0, 0.9)), 1, 300))
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), size=count))


def write_tar(path: Path, members: Iterable[Member]) -> None:
    """Write `members` with a PAX header (float mtime) before each, as webdataset's TarWriter does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o444
            info.mtime = 1763596800.5  # type: ignore[assignment]
            info.uname = info.gname = "bigdata"
            tar.addfile(info, io.BytesIO(content))


def pair_row(rng: np.random.Generator, key: str, caption: str, width: int, height: int) -> dict[str, Any]:
    """Make the sidecar row of one pair; `punsafe` and `similarity` as the LAION metadata has them."""
    return {
        "caption": caption,
        "url": f"synthetic/{key}",
        "key": key,
        "status": "success",
        "error_message": None,
        "width": width,
        "height": height,
        "original_width": width,
        "original_height": height,
        "exif": "{}",
        "punsafe": round(float(rng.random()), 6),
        "similarity": round(float(rng.random()), 6),
    }


PAIR_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("caption", "url", "key", "status", "error_message")]
    + [(name, pa.int32()) for name in ("width", "height", "original_width", "original_height")]
    + [("exif", pa.string()), ("punsafe", pa.float64()), ("similarity", pa.float64())]
)


def write_pairs(
    folder: Path,
    num_samples: int = 40,
    shard_size: int = 16,
    seed: int = 0,
    *,
    formats: Sequence[str] = ("JPEG",),
    median_size: int = 96,
    parquet: bool = True,
) -> Path:
    """Write image-text shards (`.tar`, `.parquet`, `_stats.json`) of `shard_size` samples; return `folder`.

    Members are always called `.jpg`, whatever the format, as img2dataset's are.
    """
    rng = np.random.default_rng(seed)
    for shard, first in enumerate(range(0, num_samples, shard_size)):
        members: list[Member] = []
        rows = []
        for position in range(min(shard_size, num_samples - first)):
            key = f"{shard:05d}{position:04d}"
            width, height = draw_size(rng, median_size)
            row = pair_row(rng, key, draw_caption(rng), width, height)
            image = make_image(rng, width, height, formats[(first + position) % len(formats)])
            members.append((f"{key}.jpg", image))
            members.append((f"{key}.json", json.dumps(row).encode()))
            members.append((f"{key}.txt", row["caption"].encode()))
            rows.append(row)
        write_tar(folder / f"{shard:05d}.tar", members)
        if parquet:
            pq.write_table(pa.Table.from_pylist(rows, PAIR_SCHEMA), folder / f"{shard:05d}.parquet")
            stats = {"count": len(rows), "successes": len(rows), "failed_to_download": 0}
            (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats, indent=4))
    return folder


def write_interleaved(
    folder: Path, num_samples: int = 24, shard_size: int = 8, seed: int = 0, *, median_size: int = 96
) -> Path:
    """Write interleaved documents (1..6 images with texts between them); return `folder`."""
    rng = np.random.default_rng(seed)
    for shard, first in enumerate(range(0, num_samples, shard_size)):
        members: list[Member] = []
        for position in range(min(shard_size, num_samples - first)):
            key = f"{shard:05d}{position:04d}"
            texts: list[str | None] = []
            images: list[str | None] = []
            if rng.random() < 0.7:
                texts, images = [draw_caption(rng)], [None]
            for i in range(int(min(6, rng.geometric(0.4)))):
                name = f"{key}.{i}.jpg"
                members.append((name, make_image(rng, *draw_size(rng, median_size))))
                texts.append(None)
                images.append(name)
                if rng.random() < 0.8:
                    texts.append(draw_caption(rng))
                    images.append(None)
            document = {"texts": texts, "images": images, "general_metadata": {"url": f"synthetic/{key}"}}
            members.append((f"{key}.json", json.dumps(document).encode()))
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


def write_texts(folder: Path, num_samples: int = 40, shard_size: int = 16, seed: int = 0) -> Path:
    """Write text-only samples `KEY.txt`; return `folder`."""
    rng = np.random.default_rng(seed)
    for shard, first in enumerate(range(0, num_samples, shard_size)):
        count = min(shard_size, num_samples - first)
        members = [(f"{shard:05d}{i:04d}.txt", draw_caption(rng, 40).encode()) for i in range(count)]
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


def break_pixels(image: memoryview) -> None:
    """Leave the header as it is, and make the rest impossible: pixels of a PNG, Huffman tables of a JPEG."""
    content = bytes(image)
    start = content.find(b"\xff\xc4") + 5 if content.startswith(b"\xff\xd8") else len(content) // 2
    end = start + 16 if content.startswith(b"\xff\xd8") else len(content)
    image[start:end] = bytes(255 - byte for byte in content[start:end])


def break_images(folder: Path, *images: tuple[int, int]) -> None:
    """Break images (row, number) of the first shard of an indexed dataset, and index it again, which keeps them."""
    shard = Dataset.open(folder).shards[0]
    data = bytearray(shard.file.path.read_bytes())
    for row, number in images:
        ref = shard.image(row, number)
        break_pixels(memoryview(data)[ref.offset : ref.offset + ref.length])
    shard.file.path.write_bytes(data)
    build_index(folder, workers=1)
