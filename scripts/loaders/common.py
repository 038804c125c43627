"""What all loaders but ours share: one function from bytes to patches.

Imports nothing of ours, so that a serial loop over it is what anybody could write.
"""

import io
import os
import tarfile
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

PATCH, BLOCK, MAX_BLOCKS = 14, 28, 256
"""Pixels of a patch and of a merge block of 2 x 2 patches; most blocks of an image."""
U8 = NDArray[np.uint8]
Place = tuple[Path, int, int]
"""Shard, offset and bytes of an image."""
Files = dict[Path, io.FileIO]
"""Open shards by their path."""

cv2.setNumThreads(1)


def grid(width: int, height: int) -> tuple[int, int]:
    """(columns, rows) of merge blocks: never enlarged, at most MAX_BLOCKS, aspect kept."""
    scale = min(1.0, (MAX_BLOCKS * BLOCK * BLOCK / (width * height)) ** 0.5)
    columns, rows = max(1, round(width * scale / BLOCK)), max(1, round(height * scale / BLOCK))
    while columns * rows > MAX_BLOCKS:
        columns, rows = (columns - 1, rows) if columns >= rows else (columns, rows - 1)
    return columns, rows


def fast(data: bytes) -> U8:
    """JPEG bytes to patches, uint8 [patches, 588]: libjpeg-turbo at a power of two, OpenCV's linear filter."""
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    columns, rows = grid(width, height)
    goal = columns * BLOCK, rows * BLOCK
    factor = 1
    while factor < 8 and width / factor / 2 >= goal[0] and height / factor / 2 >= goal[1]:
        factor *= 2
    pixels = simplejpeg.decode_jpeg(data, min_width=-(-width // factor), min_height=-(-height // factor))
    if pixels.shape[1::-1] != goal:
        pixels = cv2.resize(pixels, goal, interpolation=cv2.INTER_LINEAR)
    return patches(pixels, rows, columns)


def plain(data: bytes) -> U8:
    """JPEG bytes to patches as most loaders do it: Pillow, whole, bicubic."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    columns, rows = grid(*image.size)
    return patches(np.asarray(image.resize((columns * BLOCK, rows * BLOCK), Image.Resampling.BICUBIC)), rows, columns)


def patches(pixels: U8, rows: int, columns: int) -> U8:
    """Cut in the order of merge blocks; one row of a patch moves as one element."""
    line = np.dtype((np.void, PATCH * 3))
    lines = pixels.reshape(rows * BLOCK, -1).view(line).reshape(rows, 2, PATCH, columns, 2)
    return np.ascontiguousarray(lines.transpose(0, 3, 1, 4, 2)).view(np.uint8).reshape(-1, PATCH * PATCH * 3)


DECODERS = {"fast": fast, "plain": plain}


def members(folder: Path) -> list[Place]:
    """Return where each image lies in the shards."""
    found: list[Place] = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            found += [(shard, m.offset_data, m.size) for m in tar if m.name.endswith(".jpg")]
    return found


def read(files: Files, place: Place) -> bytes:
    """Bytes of one image; for several threads at once."""
    shard, offset, size = place
    file = files.get(shard)
    if file is None:
        file = files[shard] = shard.open("rb", buffering=0)
    return os.pread(file.fileno(), size, offset)


def joined(images: list[U8]) -> tuple[U8, NDArray[np.int64]]:
    """A batch: patches of all images, and how many each has."""
    return np.concatenate(images), np.array([len(image) for image in images])
