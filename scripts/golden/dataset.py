"""Two tiny datasets that are the same, byte for byte, with every version of every library.

Images are PNG without compression, so that neither zlib nor a decoder can change a bit, and their sides are multiples
of `PATCH * MERGE`, so that none is resized. One image is cut short: it cannot be decoded.
"""

import binascii
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATCH, MERGE, MAX_PATCHES = 8, 2, 36
SIDES = (16, 32, 48)
BROKEN = 5
"""The pair whose image is cut short."""
TEXTS = (
    "a red boat on the river",
    "two dogs",
    "eine alte Stra\u00dfe mit B\u00e4umen",
    "the house of the old men, seen from a tree",
    "\u732b",
)

Member = tuple[str, bytes]


def pixels(number: int) -> npt.NDArray[np.uint8]:
    """Image `number`: a pattern of integers, RGB, (rows, columns, 3)."""
    height, width = SIDES[number % 3], SIDES[(number // 2) % 3]
    y, x, channel = np.ogrid[:height, :width, :3]
    return ((x * (number + 1) + y * (2 * number + 3) + channel * 85 + (x * y >> 3)) % 256).astype(np.uint8)


def png(image: npt.NDArray[np.uint8]) -> bytes:
    """Encode with stored deflate blocks (RFC 1951, 3.2.4), which no library has a say in."""
    height, width, _ = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    blocks = [rows[i : i + 0xFFFF] for i in range(0, len(rows), 0xFFFF)]
    stored = b"".join(
        struct.pack("<BHH", block is blocks[-1], len(block), len(block) ^ 0xFFFF) + block for block in blocks
    )
    data = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def write_golden(folder: Path) -> dict[str, Path]:
    """Write the shards of `pairs` and `docs`; their folders by name."""
    for shard in range(2):
        _write_tar(folder / "pairs" / f"{shard:05d}.tar", _pairs(range(8 * shard, 8 * shard + 8)))
    _write_tar(folder / "docs" / "00000.tar", _documents(range(5)))
    return {name: folder / name for name in ("pairs", "docs")}


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", binascii.crc32(kind + data))


def _pairs(numbers: range) -> Iterable[Member]:
    for number in numbers:
        image = pixels(number)
        encoded = png(image)
        columns: dict[str, Any] = {
            "width": image.shape[1],
            "height": image.shape[0],
            "punsafe": number / 16,
            "reviewed": number % 2 == 0,
            "url": f"synthetic/{number}",
            "hash": 2**53 + 2 * number + 1,
        }
        yield f"{number:04d}.png", encoded[: len(encoded) // 2] if number == BROKEN else encoded
        yield f"{number:04d}.json", json.dumps(columns).encode()
        yield f"{number:04d}.txt", TEXTS[number % len(TEXTS)].encode()


def _documents(numbers: range) -> Iterable[Member]:
    for number in numbers:
        texts: list[str | None] = [TEXTS[number]]
        images: list[str | None] = [None]
        for image in range(number % 3):
            name = f"{number:04d}.{image}.png"
            yield name, png(pixels(16 + 3 * number + image))
            texts += [None, TEXTS[image]]
            images += [name, None]
        yield f"{number:04d}.json", json.dumps({"texts": texts, "images": images}).encode()


def _write_tar(path: Path, members: Iterable[Member]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
