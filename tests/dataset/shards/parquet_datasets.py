"""Rows of pairs for Parquet files, and what an index of such files says."""

from pathlib import Path

import numpy as np
from shards import make_image

from dataserver.dataset import Dataset, build_index, lint

RNG = np.random.default_rng(7)
JPEGS = [make_image(RNG, int(width), 40 + n) for n, width in enumerate(RNG.integers(32, 160, 23))]
ROWS: list[tuple[str, bytes | None, str | None]] = [(f"k.{n}", jpeg, f"text {n}") for n, jpeg in enumerate(JPEGS)]


def index(folder: Path) -> tuple[Dataset, dict[str, int]]:
    report = build_index(folder, workers=1)
    assert dict(lint(folder).counts) == report.findings
    return Dataset.open(folder, may_be_empty=True), dict(report.findings)


def details(folder: Path) -> dict[str, str]:
    """The first finding of each kind."""
    return {finding.kind: finding.detail for finding in reversed(lint(folder).findings)}


def images_of(dataset: Dataset) -> list[list[bytes]]:
    """The encoded images of all samples of one shard, in an order that jumps about."""
    (shard,) = dataset.shards
    counts = np.diff(shard.sizes().image_offsets).tolist()
    found = {
        row: [dataset.read(shard.image(row, i)) for i in range(counts[row])] for row in RNG.permutation(len(counts))
    }
    return [found[row] for row in range(len(counts))]


def with_footer(path: Path, before: bytes, after: bytes) -> None:
    """Replace the last occurrence of some bytes in the footer of a file, by others of any length."""
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    head, found, tail = data[start:-8].rpartition(before)
    assert found
    footer = head + after + tail
    path.write_bytes(data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
