"""Encoded images for the tests of this folder."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image
from skimage import data as photographs

from dataserver.images import ImageShape, decode_patches
from dataserver.planning.job.fields import Sizing

ASTRONAUT = Image.fromarray(photographs.astronaut())


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def noise(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of random pixels in any mode that `Image.frombytes` takes."""
    bits = {"I;16": 2, "1": 1}.get(mode) or len(Image.new(mode, (1, 1)).getbands())
    size = (width + 7) // 8 * height if mode == "1" else width * height * bits
    return Image.frombytes(mode, (width, height), np.random.default_rng(seed).bytes(size))


def decode(data: bytes, shape: ImageShape, sizing: Sizing) -> tuple[bool, np.ndarray]:
    """Decode into a buffer of rubbish."""
    out = np.full((shape.rows * shape.columns, sizing.patch**2 * 3), 171, np.uint8)
    return decode_patches(data, shape, sizing, out), out


def naive_patches(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Cut patches one by one, in the order that the proto describes."""
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    result = []
    for block_row in range(rows // merge):
        for block_column in range(columns // merge):
            for inner_row in range(merge):
                for inner_column in range(merge):
                    y, x = (block_row * merge + inner_row) * patch, (block_column * merge + inner_column) * patch
                    result.append(pixels[y : y + patch, x : x + patch].reshape(-1))
    return np.array(result)


def join_patches(patches: np.ndarray, rows: int, columns: int, patch: int, merge: int) -> np.ndarray:
    """The inverse of `naive_patches`."""
    numbers = np.arange(rows * columns * patch * patch * 3).reshape(rows * patch, columns * patch, 3)
    flat = np.empty(numbers.size, np.uint8)
    flat[naive_patches(numbers, patch, merge).reshape(-1)] = patches.reshape(-1)
    return flat.reshape(numbers.shape)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(*chunks: tuple[bytes, bytes], width: int = 8, height: int = 8) -> bytes:
    """A grey PNG with extra chunks between header and pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(min(width, 64)) for _ in range(min(height, 64))))
    parts = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, content) for kind, content in parts)
