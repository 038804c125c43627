#!/usr/bin/env python
"""The same images in tars and in other formats: CPU time of an image that is read and decoded, and of indexing a byte.

Converting is compared with zstd alone, and with copying, of the same bytes. All is measured in turn in this process, in
CPU time, and shown as a ratio in the same round; a second set is of another size and seed. Images are read in a random
order, compressed pages without the cache of decompressed pages: as in a shuffle window that is far larger than the
cache. The exit code is 1 on a miss.
"""

import argparse
import io
import json
import os
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from benchmarks.rows import Row, report
from PIL import Image
from skimage import data as photographs

from dataserver.dataset import Dataset, build_index, open_shards
from dataserver.dataset.conversion.convert import convert
from dataserver.images import ImageShape, decode_patches
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.grids import patch_grid

WRITERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Parquet as datasets writes": {"compression": "none", "use_dictionary": False, "data_page_size": 750_000},
    "Parquet ZSTD, pages of 1 MiB": {"compression": "zstd", "use_dictionary": False, "write_batch_size": 1},
    "Parquet SNAPPY, pages of 0.75 MiB": {"use_dictionary": False, "data_page_size": 750_000, "write_batch_size": 1},
}
PER_IMAGE: Final = 1.15
"""Most CPU time of an image, in that of one in a tar."""
PER_LOOSE_IMAGE: Final = 1.1
"""The same where each image is a file."""
PER_BYTE: Final = 1 / 0.8
"""Most time of indexing, and of converting over what it cannot do without."""
LOOSE: Final = "JSONL manifest", "folder of images"
IMAGE_TYPE: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def draw_images(count: int, width: int, seed: int) -> list[bytes]:
    """Crops of photographs, about `width` pixels wide."""
    rng = np.random.default_rng(seed)
    sources = [Image.fromarray(getattr(photographs, n)()) for n in ("astronaut", "coffee", "chelsea", "rocket")]
    found = []
    for _ in range(count):
        source = sources[int(rng.integers(len(sources)))]
        scale = width / source.width * float(rng.uniform(1.1, 1.6))
        whole = source.resize((int(source.width * scale), int(source.height * scale)))
        left, top = (int(rng.integers(0, max(side - width, 1))) for side in whole.size)
        buffer = io.BytesIO()
        whole.crop((left, top, min(left + width, whole.width), min(top + width, whole.height))).save(
            buffer, "JPEG", quality=int(rng.integers(85, 95))
        )
        found.append(buffer.getvalue())
    return found


def write(folder: Path, images: list[bytes]) -> dict[str, Path]:
    """A folder for each format, indexed."""
    folders = {name: folder / f"{n}" for n, name in enumerate(("tar", *WRITERS, *LOOSE))}
    for made in folders.values():
        made.mkdir()
    with tarfile.open(folders["tar"] / "0.tar", "w") as tar:
        for n, image in enumerate(images):
            for extension, content in (("jpg", image), ("txt", b"a photograph")):
                info = tarfile.TarInfo(f"{n:09d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    held = pa.array([{"bytes": image, "path": None} for image in images], IMAGE_TYPE)
    table = pa.table({"image": held, "text": ["a photograph"] * len(images)})
    for name, options in WRITERS.items():
        pq.write_table(table, folders[name] / "0.parquet", **options)
    for name in LOOSE:
        for n, image in enumerate(images):
            (folders[name] / f"{n:09d}.jpg").write_bytes(image)
    lines = [json.dumps({"image": f"{n:09d}.jpg", "text": "a photograph"}) for n in range(len(images))]
    (folders[LOOSE[0]] / "0.jsonl").write_text("\n".join(lines))
    for n in range(len(images)):
        (folders[LOOSE[1]] / f"{n:09d}.txt").write_text("a photograph")
    return folders


def cpu_s(work: Callable[[], object]) -> float:
    """CPU time of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def index(folder: Path) -> None:
    """Index a folder from nothing."""
    for found in folder.glob("*.index"):
        found.unlink()
    build_index(folder, workers=1)


def read_and_decode(folder: Path, seed: int) -> None:
    """All images in a random order, each by itself."""
    dataset = Dataset.open(folder)
    sizing = Sizing()
    (shard,) = dataset.shards
    for row in np.random.default_rng(seed).permutation(shard.num_samples).tolist():
        ref = shard.image(row, 0)
        rows, columns = patch_grid(ref.width, ref.height, sizing)
        out = np.empty((rows * columns, sizing.patch**2 * 3), np.uint8)
        assert decode_patches(dataset.read(ref), ImageShape(*ref[3:6], rows, columns), sizing, out)


def format_rows(images: list[bytes], rounds: int, seed: int) -> list[Row]:
    """Rows of one set of images."""
    num_bytes = sum(map(len, images))
    what = f"{len(images)} images of {num_bytes / len(images) / 1e3:.0f} KB"
    with tempfile.TemporaryDirectory() as root:
        folders = write(Path(root), images)
        indexing: dict[str, list[float]] = {name: [] for name in folders}
        reading: dict[str, list[float]] = {name: [] for name in folders}
        for folder in folders.values():
            index(folder)
            read_and_decode(folder, seed)
        for number in range(rounds):
            for name, folder in folders.items():
                size = sum(
                    found.stat().st_size for found in folder.iterdir() if found.suffix in (".tar", ".parquet", ".jpg")
                )
                indexing[name].append(cpu_s(lambda folder=folder: index(folder)) / size)  # type: ignore[misc]
                reading[name].append(cpu_s(lambda folder=folder: read_and_decode(folder, number)))  # type: ignore[misc]  # noqa: B023
    rows = []
    for name in (*WRITERS, *LOOSE):
        most = PER_LOOSE_IMAGE if name in LOOSE else PER_IMAGE
        by_image, by_byte = (
            statistics.median(one / tar for one, tar in zip(found[name], found["tar"], strict=True))
            for found in (reading, indexing)
        )
        rows += [
            Row(
                f"CPU per image, {name} / tar, {what}",
                f"{by_image:.3f}",
                f"<= {most}",
                by_image <= most,
            ),
            Row(f"indexing a byte, {name} / tar, {what}", f"{by_byte:.3f}", f"<= {PER_BYTE}", by_byte <= PER_BYTE)
            if name in WRITERS
            else Row(f"indexing a byte, {name} / tar, {what}", f"{by_byte:.3f}", "", None),
        ]
    return rows


def convert_rows(images: list[bytes], rounds: int) -> list[Row]:
    """Converting a compressed tar beside zstd alone, and a plain one beside a copy."""
    with tempfile.TemporaryDirectory() as root:
        tar = write(Path(root), images)["tar"] / "0.tar"
        packed = Path(root) / "packed/0.tar.zst"
        packed.parent.mkdir()
        packed.write_bytes(zstandard.compress(tar.read_bytes()))

        def unpack(source: BinaryIO, out: BinaryIO) -> None:
            zstandard.ZstdDecompressor().copy_stream(source, out)

        def to_disk(alone: Callable[[BinaryIO, BinaryIO], object], path: Path, target: Path) -> None:
            with path.open("rb") as source, target.open("wb") as out:
                alone(source, out)
                out.flush()
                os.fsync(out.fileno())

        ways: dict[str, tuple[Path, Callable[[BinaryIO, BinaryIO], object]]] = {
            "zstd": (packed, unpack),
            "copying": (tar, shutil.copyfileobj),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name, (source, alone) in ways.items():
                target = Path(root) / f"{name}-{number}"
                ours = cpu_s(lambda source=source, target=target: convert(source, target, workers=1))  # type: ignore[misc]
                theirs = cpu_s(lambda a=alone, s=source, t=target: to_disk(a, s, t / "alone"))  # type: ignore[misc]
                found[name].append(ours / theirs)
                shutil.rmtree(target)
    medians = {name: statistics.median(ratios) for name, ratios in found.items()}
    return [
        Row(f"converting / {name} alone", f"{ratio:.3f}", f"<= {PER_BYTE}", ratio <= PER_BYTE)
        for name, ratio in medians.items()
    ]


def main() -> int:
    """Measure formats, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=300, help="of the first set (default 300)")
    parser.add_argument("--width", type=int, default=512, help="of these, in pixels (default 512)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    open_shards.PAGE_CACHE_BYTES = 0  # type: ignore[misc]
    images, width, seed = arguments.images, arguments.width, arguments.seed
    rows = []
    for count, side, draw in ((images, width, seed), (images, width * 3 // 2, seed + 1)):
        rows += format_rows(draw_images(count, side, draw), arguments.rounds, draw)
    rows += convert_rows(20 * draw_images(images, width, seed), arguments.rounds)
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
