"""Indexes that Arrow opens and that no build has written."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from shards import write_interleaved, write_texts

from dataserver.dataset import Dataset, StaleIndexError, build_index
from dataserver.dataset.descriptions import describe
from dataserver.dataset.index.columns import CORE_SCHEMA, IMAGE_TYPE, RANGES, check_images
from dataserver.dataset.index.format import (
    FINDINGS_KEY,
    HEADER_KEY,
    META_PREFIX,
    IndexHeader,
    read_batch,
    read_columns,
    read_findings,
    read_schema,
)
from dataserver.dataset.index.numeric import numeric_path
from dataserver.dataset.shards.listing import ShardFile, find_shards


@pytest.fixture
def shard(tmp_path: Path) -> ShardFile:
    """Two batches of samples, indexed."""
    folder = write_texts(tmp_path, 300, 300)
    build_index(folder, workers=1)
    (shard,) = find_shards(folder)
    return shard


def rewrite(path: Path, change: Callable[[pa.RecordBatch], pa.RecordBatch], findings: str | None = None) -> None:
    """Change the last batch, and what is said of findings; buffers are those of Zstandard."""
    with pa.ipc.open_file(path.read_bytes()) as reader:
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    metadata = dict(batches[0].schema.metadata)
    if findings is not None:
        metadata[FINDINGS_KEY] = findings.encode()
    batches[-1] = change(batches[-1])
    numeric_path(path).unlink(missing_ok=True)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(path), batches[0].schema.with_metadata(metadata), options=options) as writer:
        for batch in batches:
            writer.write_batch(batch.replace_schema_metadata(metadata))


def test_buffers_of_zstandard_are_read_too(shard: ShardFile) -> None:
    """Builds before this release wrote them."""
    before = Dataset.open(shard.root)
    expected, sizes = before.shards[0].parts(299), before.shards[0].sizes()
    written = shard.index_path.read_bytes()
    rewrite(shard.index_path, lambda batch: batch)
    assert shard.index_path.read_bytes() != written
    after = Dataset.open(shard.root)
    assert after.fingerprint == before.fingerprint
    assert after.shards[0].parts(299) == expected
    assert after.shards[0].sizes().text_bytes.tolist() == sizes.text_bytes.tolist()


def with_keys(offset: Callable[[int], int], text: bytes) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Keys of 4 bytes each that begin elsewhere, or are other bytes."""

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        offsets = pa.array([offset(4 * n) for n in range(len(batch) + 1)], pa.int32()).buffers()[1]
        position = batch.schema.names.index("key")
        keys = pa.Array.from_buffers(pa.string(), len(batch), [None, offsets, pa.py_buffer(text * len(batch))])
        return batch.set_column(position, batch.schema.field(position), keys)

    return change


def read(shard: ShardFile, header: IndexHeader) -> tuple[list[str], list[str]]:
    """The keys, all at once and of the last batch."""
    batch = read_batch(shard.index_path, header, 1, ["key"])
    return read_columns(shard.index_path, header, ["key"]).column("key").to_pylist()[256:], batch.column(
        "key"
    ).to_pylist()


def test_columns_are_what_was_written_or_refused(shard: ShardFile) -> None:
    header, _ = read_schema(shard.index_path)
    rewrite(shard.index_path, with_keys(lambda n: n, b"text"))
    assert read(shard, header) == (["text"] * 44, ["text"] * 44)
    good = shard.index_path.read_bytes()
    damaged = (
        (lambda n: n, b"te\xfft"),
        (lambda n: n + 400 * (n == 40), b"text"),
        (lambda n: n - 8 * (n == 40), b"text"),
    )
    for offset, text in damaged:
        rewrite(shard.index_path, with_keys(offset, text))
        for ask in (partial(read_columns, shard.index_path, header), partial(read_batch, shard.index_path, header, 1)):
            with pytest.raises(
                StaleIndexError, match=rf"{shard.index_path} cannot be read \(.*remove it and index again"
            ):
                ask(["key"])
        shard.index_path.write_bytes(good)
    assert read(shard, header) == (["text"] * 44, ["text"] * 44)


def test_findings_are_of_known_kinds(shard: ShardFile) -> None:
    said = {"counts": {"unreadable_header": 2}, "details": [["a", "unreadable_header", "b"]]}
    rewrite(shard.index_path, lambda batch: batch, json.dumps(said))
    assert read_findings(shard.index_path).counts == {"unreadable_header": 2}
    for other in ({**said, "counts": {"new": 1}}, {**said, "details": [["a", "new", "b"]]}):
        rewrite(shard.index_path, lambda batch: batch, json.dumps(other))
        with pytest.raises(StaleIndexError, match="it counts an unknown kind of finding"):
            read_findings(shard.index_path)


def read_all(folder: Path) -> None:
    """All that anybody asks of an index."""
    dataset = Dataset.open(folder)
    (shard,) = dataset.shards
    shard.keys()
    shard.sizes()
    list(describe(dataset, [(0, 0), (0, 1)]))
    for row in range(shard.num_samples):
        shard.parts(row)


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Path, pa.Table]:
    """A folder of one indexed shard of documents with texts, images and a sidecar column; what the index holds."""
    folder = write_interleaved(tmp_path, 4, 4, median_size=24)
    build_index(folder, workers=1)
    (shard,) = find_shards(folder)
    with pa.ipc.open_file(shard.index_path.read_bytes()) as reader:
        table = reader.read_all()
    table = table.append_column(pa.field(META_PREFIX + "score", pa.int64()), pa.array([1, 2, None, 4]))
    write(folder, table)
    read_all(folder)
    return folder, table


def write(folder: Path, table: pa.Table) -> None:
    (shard,) = find_shards(folder)
    numeric_path(shard.index_path).unlink(missing_ok=True)
    with pa.ipc.new_file(str(shard.index_path), table.schema) as writer:
        writer.write_table(table)


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.names.index(name), name, values)


def with_images(table: pa.Table, change: Callable[[dict[str, Any]], dict[str, Any] | None], kind: Any) -> pa.Table:
    rows = table.column("images").to_pylist()
    return with_column(table, "images", pa.array([[change(image) for image in row] for row in rows], pa.list_(kind)))


def schemas(table: pa.Table) -> Iterator[pa.Table]:
    """Tables whose columns are not those of an index."""
    for name in CORE_SCHEMA.names:
        yield table.drop_columns(name)
        yield table.append_column(name, table.column(name))
        yield table.rename_columns([f"{n}_" if n == name else n for n in table.schema.names])
        others = (pa.int64(), pa.string(), pa.list_(pa.string()), pa.list_(pa.int64()), pa.list_(pa.list_(pa.uint8())))
        for kind in {*others} - {CORE_SCHEMA.field(name).type}:
            yield with_column(table, name, pa.nulls(len(table), kind))
    for field in IMAGE_TYPE:
        without = pa.struct([other for other in IMAGE_TYPE if other != field])
        yield with_images(table, lambda image: image, without)
        yield with_images(table, lambda image: image, pa.struct([*without, pa.field(field.name, pa.float32())]))
        renamed = [pa.field(f.name + "_" * (f == field), f.type) for f in IMAGE_TYPE]
        yield with_images(table, lambda image: image, pa.struct(renamed))
    for kind in (pa.int32(), pa.list_(pa.int64()), pa.binary()):
        yield with_column(table, META_PREFIX + "score", pa.nulls(len(table), kind))
    yield table.rename_columns([*CORE_SCHEMA.names, "score"])
    yield table.append_column(META_PREFIX + "score", table.column(META_PREFIX + "score"))


def contents(table: pa.Table) -> Iterator[pa.Table]:
    """Tables whose values are not those of an index."""
    yield table.slice(1)
    yield pa.concat_tables([table, table.slice(3)]).combine_chunks()
    for name in CORE_SCHEMA.names:
        kind, rows = CORE_SCHEMA.field(name).type, table.column(name).to_pylist()
        yield with_column(table, name, pa.array([None, *rows[1:]], kind))
        if name != "key":
            yield with_column(table, name, pa.array([[None] * len(rows[0]), *rows[1:]], kind))
            yield with_column(table, name, pa.array([rows[0] * 2 or [rows[1][0]], *rows[1:]], kind))
            yield with_column(table, name, pa.array([rows[0][1:], *rows[1:]], kind))
    for numbers in ([0] * 20, [1] * 20, [2] * 20):
        kinds = [numbers[: len(row)] for row in table.column("kinds").to_pylist()]
        yield with_column(table, "kinds", pa.array(kinds, pa.list_(pa.uint8())))
    negative = [[-1 for _ in row] for row in table.column("text_bytes").to_pylist()]
    yield with_column(table, "text_bytes", pa.array(negative, pa.list_(pa.int32())))
    for name in IMAGE_TYPE.names:
        for wrong in (None, RANGES[name][0] - 1, RANGES[name][1] + 1):
            if wrong is None or wrong >= 0 or name not in ("orientation", "format"):
                yield with_images(table, lambda i, n=name, w=wrong: {**i, n: w}, IMAGE_TYPE)
    yield with_images(table, lambda image: {**image, "width": 1 << 14, "height": 1 << 14}, IMAGE_TYPE)


def test_the_image_that_is_too_large_is_the_one_that_is_named() -> None:
    sides = np.array([300, 1 << 14])
    fields = {name: np.full(2, least) for name, (least, _) in RANGES.items()} | {"width": sides, "height": sides}
    with pytest.raises(ValueError, match=f"it gives an image {1 << 28} pixels"):
        check_images(fields)


@pytest.mark.parametrize("name", ["offset", "length"])
def test_an_image_that_begins_before_its_shard_or_is_less_than_nothing_is_refused(name: str) -> None:
    fields = {field: np.full(1, least) for field, (least, _) in RANGES.items()}
    check_images(fields | {name: np.zeros(1, np.int64)})
    with pytest.raises(ValueError, match=f"{name}.*-1"):
        check_images(fields | {name: np.full(1, -1)})


@pytest.mark.parametrize("damages", [schemas, contents])
def test_an_index_has_the_columns_and_values_of_one_or_is_refused(
    documents: tuple[Path, pa.Table], damages: Callable[[pa.Table], Iterator[pa.Table]]
) -> None:
    folder, table = documents
    for damaged in damages(table):
        write(folder, damaged)
        with pytest.raises(StaleIndexError, match=r"cannot be read \(it.*remove it and index again"):
            read_all(folder)
    write(folder, table)
    read_all(folder)


@pytest.mark.parametrize(
    "change",
    [{"num_samples": "4"}, {"num_samples": True}, {"num_samples": 300}, {"sha256": None}, {"shard_bytes": 1.5}],
    ids=str,
)
def test_a_header_is_one(documents: tuple[Path, pa.Table], change: dict[str, Any]) -> None:
    folder, table = documents
    metadata = table.schema.metadata
    header = json.loads(metadata[HEADER_KEY]) | change
    write(folder, table.replace_schema_metadata({**metadata, HEADER_KEY: json.dumps(header)}))
    with pytest.raises(StaleIndexError, match=r"cannot be read \(it.*remove it and index again"):
        read_all(folder)
