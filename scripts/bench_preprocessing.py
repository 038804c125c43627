#!/usr/bin/env python
"""Images per second and core: `decode_patches` against plain Pillow (full decode, bicubic, numpy patches).

Both run on the same images, one after the other in every round, on one thread; times are CPU times, so that other
processes disturb them little. Without --dataset, photographs of scikit-image are cropped to sizes skewed as in LAION.
"""

import argparse
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data as photographs

from dataserver.dataset import Dataset
from dataserver.planning.jobspec import Sizing
from dataserver.planning.sizing import patch_grid
from dataserver.preprocessing import ImageShape, decode_patches, silence_pillow_warnings

Picture = tuple[bytes, ImageShape]


def synthetic(num_images: int, sizing: Sizing) -> list[Picture]:
    """Seeded crops, widths log-normal with p10 / p50 / p90 of about 256 / 512 / 1200, JPEG quality 75 to 95."""
    rng = np.random.default_rng(0)
    sources = [Image.fromarray(getattr(photographs, n)()) for n in ("astronaut", "coffee", "chelsea", "rocket")]
    pictures = []
    for i in range(num_images):
        width = int(np.clip(512 * np.exp(rng.normal(0, 0.6)), 64, 3000))
        height = int(np.clip(width / np.exp(rng.normal(0.15, 0.35)), 64, 3000))
        buffer = io.BytesIO()
        source = sources[i % len(sources)]
        left, top = (int(rng.integers(0, side // 2)) for side in source.size)
        crop = source.crop((left, top, left + source.width // 2, top + source.height // 2)).resize((width, height))
        crop.save(buffer, "JPEG", quality=int(rng.integers(75, 96)))
        pictures.append((buffer.getvalue(), ImageShape(width, height, 1, *patch_grid(width, height, sizing))))
    return pictures


def from_dataset(path: Path, index_dir: Path | None, num_images: int, sizing: Sizing) -> list[Picture]:
    """Images spread evenly over an indexed dataset."""
    dataset = Dataset.open(path, index_dir)
    rows = [(shard, row) for shard in dataset.shards for row in range(shard.num_samples)]
    pictures = []
    for shard, row in rows[:: max(1, len(rows) // num_images)]:
        if 1 in shard.parts(row).kinds:
            ref = shard.image(row, 0)
            grid = patch_grid(ref.width, ref.height, sizing)
            pictures.append((dataset.read(ref), ImageShape(ref.width, ref.height, ref.orientation, *grid)))
    return pictures


def plain_pillow(data: bytes, shape: ImageShape, sizing: Sizing, out: np.ndarray) -> bool:
    """What most loaders do."""
    patch, merge = sizing.patch, sizing.merge
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.resize((shape.columns * patch, shape.rows * patch), Image.Resampling.BICUBIC)
    blocks = np.asarray(image).reshape(shape.rows // merge, merge, patch, shape.columns // merge, merge, patch, 3)
    out[:] = blocks.transpose(0, 3, 1, 4, 2, 5, 6).reshape(out.shape)
    return True


def measure(decode: Callable[..., bool], pictures: list[Picture], sizing: Sizing, buffer: np.ndarray) -> float:
    """Return images per second of CPU time."""
    start = time.process_time()
    for data, shape in pictures:
        decode(data, shape, sizing, buffer[: shape.rows * shape.columns])
    return len(pictures) / (time.process_time() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="folder of indexed shards; default: synthetic photographs")
    parser.add_argument("--index-dir", type=Path, help="where its indexes lie, if not beside the shards")
    parser.add_argument("--images", type=int, default=200, help="number of images (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--max-patches", type=int, default=1024, help="bound of an image's patches (default 1024)")
    arguments = parser.parse_args()
    silence_pillow_warnings()
    sizing = Sizing(max_patches=arguments.max_patches)
    if arguments.dataset is None:
        pictures = synthetic(arguments.images, sizing)
    else:
        pictures = from_dataset(arguments.dataset, arguments.index_dir, arguments.images, sizing)
    buffer = np.zeros((sizing.max_patches, sizing.patch**2 * 3), np.uint8)
    rates: dict[str, list[float]] = {"decode_patches": [], "plain Pillow": []}
    for _ in range(arguments.rounds):
        rates["plain Pillow"].append(measure(plain_pillow, pictures, sizing, buffer))
        rates["decode_patches"].append(measure(decode_patches, pictures, sizing, buffer))
    megapixels = sum(shape.width * shape.height for _, shape in pictures) / len(pictures) / 1e6
    print(f"{len(pictures)} images of {megapixels:.2f} Mpixel on average, {arguments.rounds} rounds, one core")
    for name, values in rates.items():
        print(f"{name:>15}: {statistics.median(values):6.0f} images/s  ({min(values):.0f} to {max(values):.0f})")
    ratios = [a / b for a, b in zip(rates["decode_patches"], rates["plain Pillow"], strict=True)]
    print(f"{'ratio':>15}: {statistics.median(ratios):6.2f}")


if __name__ == "__main__":
    main()
