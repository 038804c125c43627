"""The same shards in other places are the same stream: in a bucket, and where nothing can be written."""

import io
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from benchmarks.range_server import State
from builders.parquets import pairs_table, tar_pairs, write_table
from PIL import Image
from serving.harness import VIEWS, index, job_data, running
from shards import write_pairs
from stores import forget_stores, no_stores, stores

from dataserver.assembly import load_tokenizer
from dataserver.dataset import Dataset, build_index, count_tokens
from dataserver.dataset.storage.pieces import BLOCK_BYTES

__all__ = ["no_stores", "stores"]

WRITERS = ("datasets", "pyarrow", "zstd")
"""Of a shard each: plain values, SNAPPY with a dictionary, ZSTD."""
ONCE = 1.03
"""Most bytes of a Parquet file that are read to index it, over its size: what begins before its block has come is read
by itself."""


def served(folder: Path, **config: Any) -> tuple[str, list[list[tuple[bytes, bytes]]]]:
    """The id of a job over a dataset, which holds its fingerprint, and all bytes of all its views."""
    with running({"pairs": folder}, **config) as server:
        job_id = server.create(job_data(datasets=[{"name": "pairs"}], end={"epochs": 1})).job_id
        return job_id, [server.read(job_id, *view).blob() for view in VIEWS]


def test_parquet_shards_in_a_bucket_are_those_on_disk(stores: tuple[State, str], tmp_path: Path) -> None:
    state, folder = stores[0], tmp_path / "parquet"
    for tar, writer in zip(sorted(write_pairs(tmp_path / "tars", 36, 12, seed=3).glob("*.tar")), WRITERS, strict=True):
        write_table(folder / f"{tar.stem}.parquet", pairs_table(tar_pairs(tar)), writer)
    index(folder)
    state.put_folder("/bucket/laion", folder)
    sizes = {path: len(stored.data) for path, stored in state.objects.items()}
    url = Path("s3://bucket/laion")
    assert build_index(url, workers=1).num_samples == 36
    assert sum(sizes.values()) <= bytes_asked_for(state, sizes) <= ONCE * sum(sizes.values())
    count_tokens(url, load_tokenizer("bytes"))
    assert Dataset.open(url).fingerprint == Dataset.open(folder).fingerprint
    forget_stores()
    state.asked.clear()
    assert served(url) == served(folder)
    assert {one.path for one in state.ranges()} >= sizes.keys(), "images came from the bucket"


def jpeg_of_noise(noise: np.random.Generator) -> bytes:
    """An image of half a megabyte, which no codec of Parquet makes smaller."""
    file = io.BytesIO()
    Image.fromarray(noise.integers(0, 256, (600, 600, 3), np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def bytes_asked_for(state: State, sizes: dict[str, int]) -> int:
    """Bytes of objects of these sizes that were asked for."""
    asked = [one.range or (0, sizes[one.path]) for one in state.asked if one.method == "GET" and one.path in sizes]
    return sum(end - start for start, end in asked)


@pytest.mark.parametrize("writer", WRITERS)
def test_parquet_shards_of_several_blocks_are_read_once(stores: tuple[State, str], tmp_path: Path, writer: str) -> None:
    """Columns of texts, before and behind those of images, are read by themselves, and their pages are looked at."""
    noise = np.random.default_rng(0)
    rows = [(f"{n}", jpeg_of_noise(noise), "a" * 9_000) for n in range(24)]
    table = pairs_table(rows, more=pa.array([noise.bytes(60_000).hex() for _ in rows]))
    size = write_table(tmp_path / "large" / "0.parquet", table, writer, row_group_size=5).stat().st_size
    assert size > BLOCK_BYTES
    stores[0].put_folder("/bucket/large", tmp_path / "large")
    assert build_index(Path("s3://bucket/large"), workers=1).num_samples == len(rows)
    assert size <= bytes_asked_for(stores[0], {"/bucket/large/0.parquet": size}) <= ONCE * size


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write in a folder: by rights, which do not bind root; for root by a mount."""
    if os.geteuid():
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside", "elsewhere"])
@pytest.mark.parametrize("copied", [False, True], ids=["indexed here", "copied"])
def test_a_dataset_and_an_index_that_cannot_be_written_are_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, elsewhere: bool, copied: bool
) -> None:
    """A copy has other times, so that a server compares it with its index first, and cannot note that it did."""
    root = tmp_path / "all"
    folder, own = write_pairs(root / "pairs", 24, 8, seed=5), root / "index" if elsewhere else None
    build_index(folder, own, workers=1)
    count_tokens(folder, load_tokenizer("bytes"), own)
    config: dict[str, Any] = {} if own is None else {"index_dirs": {"pairs": own}}
    before = served(folder, **config)
    if copied:
        for shard in folder.glob("*.tar"):
            os.utime(shard, (1e9, 1e9))
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with read_only(root):
        with pytest.raises(OSError, match=r"Read-only|Permission"):
            (root / "x").touch()
        caplog.clear()
        assert served(folder, **config) == before
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == files
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
