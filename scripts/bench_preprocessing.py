#!/usr/bin/env python
"""Images per second and core: `decode_patches` against plain Pillow (full decode, bicubic, numpy patches).

Both run on the same images, one after the other in every round, on one thread; rates are those of CPU time, scaled to
the reference machine. Without --dataset, photographs of scikit-image are cropped to sizes skewed as in LAION, and to
smaller and more skewed ones. The exit code is 1 if a ratio misses its target.
"""

import argparse
import io
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.calibration import timed
from benchmarks.rows import Row, report
from PIL import Image
from skimage import data as photographs

from dataserver.dataset import Dataset
from dataserver.planning.jobspec import Sizing
from dataserver.planning.sizing import patch_grid
from dataserver.preprocessing import ImageShape, decode_patches, silence_pillow_warnings

Picture = tuple[bytes, ImageShape]


@dataclass(frozen=True, slots=True)
class Crops:
    """Seeded crops of photographs."""

    name: str
    seed: int
    width: int
    """In the median."""
    sigma: float
    """Of the log-normal widths."""
    target: float
    """Times as fast as plain Pillow."""


CROPS = Crops("LAION-like crops", 0, 512, 0.6, 1.5), Crops("smaller, more skewed crops", 100, 320, 0.9, 1.2)
"""The first have widths with p10 / p50 / p90 of about 256 / 512 / 1200; and their sister."""


def synthetic(crops: Crops, num_images: int, sizing: Sizing) -> list[Picture]:
    """The crops as JPEG of quality 75 to 95."""
    rng = np.random.default_rng(crops.seed)
    sources = [Image.fromarray(getattr(photographs, n)()) for n in ("astronaut", "coffee", "chelsea", "rocket")]
    pictures = []
    for i in range(num_images):
        width = int(np.clip(crops.width * np.exp(rng.normal(0, crops.sigma)), 64, 3000))
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


def rate(decode: Callable[..., bool], pictures: list[Picture], sizing: Sizing, buffer: np.ndarray) -> float:
    """Images per second of scaled CPU time."""

    def run() -> None:
        for data, shape in pictures:
            decode(data, shape, sizing, buffer[: shape.rows * shape.columns])

    return 1_000 * len(pictures) / timed(run)[1]


def row(name: str, pictures: list[Picture], sizing: Sizing, rounds: int, target: float | None) -> Row:
    """Both on the same images; the first round warms up."""
    buffer = np.zeros((sizing.max_patches, sizing.patch**2 * 3), np.uint8)
    rates = [[rate(d, pictures, sizing, buffer) for d in (decode_patches, plain_pillow)] for _ in range(rounds + 1)]
    ours, pillow = zip(*rates[1:], strict=True)
    ratios = [a / b for a, b in zip(ours, pillow, strict=True)]
    megapixels = sum(shape.width * shape.height for _, shape in pictures) / len(pictures) / 1e6
    return Row(
        f"{name}: {len(pictures)} images of {megapixels:.2f} Mpixel on average, patches of one core, {rounds} rounds",
        f"{statistics.median(ours):.0f} images/s, plain Pillow {statistics.median(pillow):.0f}; "
        f"{statistics.median(ratios):.2f} x (least {min(ratios):.2f})",
        "" if target is None else f">= {target} x",
        None if target is None else statistics.median(ratios) >= target,
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="folder of indexed shards; default: crops of photographs")
    parser.add_argument("--index-dir", type=Path, help="where its indexes lie, if not beside the shards")
    parser.add_argument("--images", type=int, default=200, help="number of images (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--max-patches", type=int, default=1024, help="bound of an image's patches (default 1024)")
    arguments = parser.parse_args()
    silence_pillow_warnings()
    sizing, count, rounds = Sizing(max_patches=arguments.max_patches), arguments.images, arguments.rounds
    if arguments.dataset is not None:
        pictures = from_dataset(arguments.dataset, arguments.index_dir, count, sizing)
        return report([row(str(arguments.dataset), pictures, sizing, rounds, None)])
    return report(row(c.name, synthetic(c, count, sizing), sizing, rounds, c.target) for c in CROPS)


if __name__ == "__main__":
    sys.exit(main())
