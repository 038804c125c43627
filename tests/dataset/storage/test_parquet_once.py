"""A Parquet file in a store is read about once while it is indexed, however its row groups lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.range_server import State
from builders.parquets import IMAGE
from shards import make_image

from dataserver.dataset import Dataset, build_index
from dataserver.dataset.shards import hashing
from dataserver.dataset.shards.parquet import stored
from dataserver.dataset.storage import blocks, pieces, remote
from dataserver.dataset.storage.blocks import BLOCKS, DEFAULT_MEMORY_BYTES
from dataserver.dataset.storage.pieces import BLOCK_BYTES

Stores = tuple[State, str]

SCALE = 128
"""Blocks and buffers are smaller by that, so that a file of 5 MiB is what one of 640 MiB is otherwise."""
HELD_BYTES = DEFAULT_MEMORY_BYTES // SCALE
RNG = np.random.default_rng(11)
JPEG = make_image(RNG, 40, 30)


def texts(count: int, num_bytes: int) -> list[str]:
    return [RNG.bytes(num_bytes // 2).hex() for _ in range(count)]


def images(count: int, num_bytes: int) -> pa.Array:
    """JPEGs with bytes behind their end."""
    return pa.array([{"bytes": JPEG + RNG.bytes(num_bytes), "path": None} for _ in range(count)], IMAGE)


class Layout(NamedTuple):
    """A table of some MiB, and the rows of a row group."""

    columns: Callable[[], dict[str, Any]]
    group_rows: int


LAYOUTS = {
    "small row groups": Layout(lambda: {"image": images(120, 40_000), "text": texts(120, 2_000)}, 2),
    "two row groups, texts first": Layout(lambda: {"text": texts(60, 30_000), "image": images(60, 60_000)}, 30),
    "one row group, texts first": Layout(lambda: {"text": texts(100, 20_000), "image": images(100, 30_000)}, 100),
    "one row group, texts last": Layout(lambda: {"image": images(100, 30_000), "text": texts(100, 20_000)}, 100),
    "texts alone in small row groups": Layout(lambda: {"text": texts(100, 50_000)}, 5),
    "texts alone in one row group": Layout(lambda: {"text": texts(100, 50_000)}, 100),
    "many large columns": Layout(
        lambda: {f"c{n}": texts(50, 2_600) for n in range(39)} | {"text": texts(50, 2_600)}, 50
    ),
}


@pytest.fixture
def small_blocks(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> Stores:
    """All sizes that decide what is read at once and held, smaller."""
    for module in (pieces, blocks, remote):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES // SCALE)
    for module, name in ((remote, "_BUFFER_BYTES"), (hashing, "READ_CHUNK_BYTES"), (stored, "BUFFER_BYTES")):
        monkeypatch.setattr(module, name, getattr(module, name) // SCALE)
    BLOCKS.configure(HELD_BYTES)
    return stores


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_byte_is_read_about_once(small_blocks: Stores, tmp_path: Path, layout: str) -> None:
    state, _ = small_blocks
    columns, group_rows = LAYOUTS[layout]
    path = tmp_path / "local" / "0.parquet"
    path.parent.mkdir()
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table(columns()), path, row_group_size=group_rows, **options)
    size = path.stat().st_size
    assert size > 2 * HELD_BYTES, "more than is held"
    report = build_index(path.parent, workers=1)
    state.put_folder("/bucket/laion", path.parent)
    url = Path("s3://bucket/laion")
    assert build_index(url, tmp_path / "index", workers=1).num_samples == report.num_samples > 0
    asked = [one.range for one in state.ranges() if one.path == "/bucket/laion/0.parquet" and one.range is not None]
    num_bytes = sum(min(end, size) - start for start, end in asked)
    assert size <= num_bytes <= 1.1 * size, f"{num_bytes / size:.2f} times"
    assert Dataset.open(url, tmp_path / "index").fingerprint == Dataset.open(path.parent).fingerprint
