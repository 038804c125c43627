#!/usr/bin/env python
"""Speed and quality of `decode_patches`, of both qualities, against Pillow.

Speed is images per second of CPU time on one thread, against plain Pillow (full decode, bicubic, numpy patches), scaled
to the reference machine; both run on the same images, one after the other in every round. Quality is PSNR against
Pillow's full decode and antialiased bilinear filter, beside what libjpeg-turbo at powers of two and OpenCV's linear
filter give. Without --dataset, photographs of scikit-image are cropped to sizes skewed as in LAION, and to smaller and
more skewed ones. The exit code is 1 if a target is missed.
"""

import argparse
import io
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from benchmarks.calibration import timed
from benchmarks.rows import Row, report
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from skimage import data as photographs

from dataserver.dataset import Dataset, DatasetError
from dataserver.images import ImageShape, decode_patches, silence_pillow_warnings, write_patches
from dataserver.planning.job.fields import Quality, Sizing
from dataserver.planning.stream.grids import patch_grid

Picture = tuple[bytes, ImageShape]


@dataclass(frozen=True, slots=True)
class Crops:
    """Crops of photographs, the same for a seed."""

    name: str
    seed: int
    width: int
    """Width of a crop in the median."""
    sigma: float
    """Standard deviation of the logarithm of the widths."""


CROPS = Crops("LAION-like crops", 0, 512, 0.6), Crops("smaller, more skewed crops", 100, 320, 0.9)
"""The first have widths with p10 / p50 / p90 of about 256 / 512 / 1200; and their held-out variant."""
TIMES_AS_FAST = {Quality.FAST: 3.5, Quality.EXACT: 1.8}
"""How many times as fast as plain Pillow each quality has to be."""
LEAST_DB = {Quality.FAST: (48, 35), Quality.EXACT: (50, 50)}
"""Median and 5th percentile of the PSNR at 1,024 patches; `exact` has it at every size, and `fast` at smaller ones what
the linear filter has."""
SIZES = 1024, 256, 64


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
    """Decode an image as most loaders do."""
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


def speed(name: str, pictures: list[Picture], sizing: Sizing, rounds: int, target: float | None) -> Row:
    """Both on the same images; the first round warms up."""
    buffer = np.zeros((sizing.max_patches, sizing.patch**2 * 3), np.uint8)
    rates = [[rate(d, pictures, sizing, buffer) for d in (decode_patches, plain_pillow)] for _ in range(rounds + 1)]
    ours, pillow = zip(*rates[1:], strict=True)
    ratios = [a / b for a, b in zip(ours, pillow, strict=True)]
    megapixels = sum(shape.width * shape.height for _, shape in pictures) / len(pictures) / 1e6
    return Row(
        f"{name}, {sizing.quality}: {len(pictures)} images of {megapixels:.2f} Mpixel on average, one core, "
        f"{rounds} rounds",
        f"{statistics.median(ours):.0f} images/s, plain Pillow {statistics.median(pillow):.0f}; "
        f"{statistics.median(ratios):.2f} x (least {min(ratios):.2f})",
        "" if target is None else f">= {target} x",
        None if target is None else statistics.median(ratios) >= target,
    )


def psnr(found: np.ndarray, reference: np.ndarray) -> float:
    """Decibels; 99 for equal pixels."""
    error = float(np.mean((found.astype(np.float64) - reference) ** 2))
    return 10 * math.log10(255**2 / error) if error else 99.0


def bilinear(image: Image.Image, goal: tuple[int, int]) -> np.ndarray:
    """Pillow's antialiased filter, on white."""
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return np.asarray(white.convert("RGB").resize(goal, Image.Resampling.BILINEAR))


def linear(data: bytes, image: Image.Image, goal: tuple[int, int]) -> np.ndarray:
    """A JPEG at the largest power of two that covers the goal, any other image whole; then OpenCV's linear filter."""
    if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
        return np.asarray(cv2.resize(bilinear(image, image.size), goal))
    width, height = image.size
    scale = max(s for s in (1, 2, 4, 8) if s == 1 or (-(-width // s) >= goal[0] and -(-height // s) >= goal[1]))
    pixels = simplejpeg.decode_jpeg(data, min_width=-(-width // scale), min_height=-(-height // scale))
    return np.asarray(cv2.resize(pixels, goal))


def quality(name: str, pictures: list[Picture], max_patches: int) -> Iterator[Row]:
    """PSNR of both qualities and of the linear filter, on upright images."""
    patch, merge = 14, 2
    found: dict[str, list[float]] = {key: [] for key in (*Quality, "linear")}
    for data, shape in (p for p in pictures if p[1].orientation == 1):
        sizings = [Sizing(patch=patch, merge=merge, max_patches=max_patches, quality=q) for q in Quality]
        rows, columns = patch_grid(shape.width, shape.height, sizings[0])
        goal, image = (columns * patch, rows * patch), Image.open(io.BytesIO(data))
        reference = bilinear(image, goal)
        found["linear"].append(psnr(linear(data, image, goal), reference))
        cut = np.empty((rows * columns, patch**2 * 3), np.uint8)
        write_patches(reference, sizings[0], cut)
        for sizing in sizings:
            out = np.empty_like(cut)
            decode_patches(data, ImageShape(shape.width, shape.height, 1, rows, columns), sizing, out)
            found[sizing.quality].append(psnr(out, cut))
    low = {key: (statistics.median(values), float(np.percentile(values, 5))) for key, values in found.items()}
    for key in Quality:
        least = low["linear"] if key is Quality.FAST and max_patches < SIZES[0] else LEAST_DB[key]
        yield Row(
            f"{name}, {key}, at most {max_patches} patches, {len(found[key])} upright images",
            f"PSNR median {low[key][0]:.1f} dB, 5th percentile {low[key][1]:.1f} dB "
            f"(linear filter {low['linear'][0]:.1f}, {low['linear'][1]:.1f})",
            f">= {least[0]:.1f}, {least[1]:.1f} dB",
            low[key] >= least and low[key][1] >= least[1],
        )


def main() -> int:
    """Measure speed and quality, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="folder of indexed shards; default: crops of photographs")
    parser.add_argument("--index-dir", type=Path, help="where its indexes lie, if not beside the shards")
    parser.add_argument("--images", type=int, default=200, help="number of images (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--max-patches", type=int, default=1024, help="bound of an image's patches (default 1024)")
    arguments = parser.parse_args()
    silence_pillow_warnings()
    count, whole = arguments.images, Sizing(max_patches=arguments.max_patches)
    if arguments.dataset is not None:
        try:
            sources = {str(arguments.dataset): from_dataset(arguments.dataset, arguments.index_dir, count, whole)}
        except DatasetError as error:
            parser.error(str(error))
    else:
        sources = {crops.name: synthetic(crops, count, whole) for crops in CROPS}
    rows: list[Row] = []
    for name, pictures in sources.items():
        for of_quality in Quality:
            # Other datasets may hold other formats than JPEG; `fast` has no target for these.
            judged = arguments.dataset is None or of_quality is Quality.EXACT
            sizing = whole.model_copy(update={"quality": of_quality})
            rows.append(speed(name, pictures, sizing, arguments.rounds, TIMES_AS_FAST[of_quality] if judged else None))
        rows += [row for max_patches in SIZES for row in quality(name, pictures, max_patches)]
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
