"""Parquet files whose footer lies about encodings, sizes and counts, read with little memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.parquets import IMAGE, varint
from shards import make_image, write_tar

from dataserver.dataset.shards.parquet.stored import open_parquet, string_bytes, together

JPEG = make_image(np.random.default_rng(3), 40, 30)
LONG = "x" * (40 << 20)
"""64 of them would be 2.5 GiB."""

LIMITED = """
import json, resource, sys
from pathlib import Path
from dataserver.dataset import DatasetError, build_index, convert, lint
import cv2, pyarrow.parquet, pyarrow.compute
import dataserver.dataset.index.indexing, dataserver.dataset.conversion.parquet_samples

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
for folder in map(Path, sys.argv[1:]):
    build_index(folder, workers=1)
    print(json.dumps(dict(lint(folder).counts)))
    try:
        print(json.dumps(dict(convert(folder, folder.with_name("tars-of-" + folder.name), workers=1).findings)))
    except DatasetError as error:
        print(json.dumps(str(error)[-200:]))
"""


def lying(path: Path, table: pa.Table, **options: object) -> None:
    """Write a table; its footer says that every value is stored plain, and in few bytes."""
    limit = {"dictionary_pagesize_limit": 1 << 30, "compression": "zstd", "write_statistics": False}
    pq.write_table(table, path, **{**limit, **options}, store_schema=False)
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    body, told = data[:footer], data[footer:]
    metadata = pq.read_metadata(path)
    for n in range(metadata.num_columns):
        num_bytes = metadata.row_group(0).column(n).total_uncompressed_size
        size = varint(2 * num_bytes)
        told = told if num_bytes < 1 << 20 else told.replace(size, b"\x80" * (len(size) - 1) + b"\x00")
    told = told.replace(b"\x35\x00\x06\x10", b"\x35\x00\x06\x00")  # PLAIN, RLE, RLE_DICTIONARY
    path.write_bytes(body + told)
    held = pq.read_metadata(path).row_group(0)
    assert all(held.column(n).total_uncompressed_size < 1 << 20 for n in range(metadata.num_columns))
    assert not any("RLE_DICTIONARY" in held.column(n).encodings for n in range(metadata.num_columns))
    assert path.stat().st_size < 4 << 20


def folder_of(tmp_path: Path, name: str, table: pa.Table, **options: object) -> str:
    folder = tmp_path / name
    folder.mkdir()
    lying(folder / "0.parquet", table, **options)
    return str(folder)


def repeated(value: str | bytes, count: int) -> pa.Array:
    """One value very often, in few bytes."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [value])


def test_what_pages_unfold_to_takes_no_memory_whatever_the_footer_says(tmp_path: Path) -> None:
    rows = 64
    images = pa.array([{"bytes": JPEG, "path": None}] * rows, IMAGE)
    texts = pa.array([f"text {n}" for n in range(rows)])
    lists = pa.ListArray.from_arrays(pa.array([0, rows, rows + 1], pa.int32()), repeated(LONG, rows + 1))
    image_lists = pa.ListArray.from_arrays(pa.array([0, rows, rows + 1], pa.int32()), repeated(LONG.encode(), rows + 1))
    folders = [
        folder_of(tmp_path, "caption", pa.table({"image": images, "text": repeated(LONG, rows)})),
        folder_of(tmp_path, "column", pa.table({"image": images, "text": texts, "source": repeated(LONG, rows)})),
        folder_of(tmp_path, "texts", pa.table({"image": images[:2], "texts": lists})),
        folder_of(tmp_path, "images", pa.table({"text": texts[:2], "jpg": image_lists})),
    ]
    joined = tmp_path / "sidecar"
    pairs = [(f"{n}.{end}", data) for n in range(rows) for end, data in (("jpg", JPEG), ("txt", b"a text"))]
    write_tar(joined / "0.tar", pairs)
    lying(joined / "0.parquet", pa.table({"key": [str(n) for n in range(rows)], "source": repeated(LONG, rows)}))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *folders, str(joined)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [
        *[{"text_too_large": 64}] * 4,
        *[{"text_too_large": 2}] * 2,
        *({"unreadable_header": 2}, {"image_too_large": 1}),
        *({"unusable_column": 1}, {}),
    ]


def test_sizes_are_those_that_arrow_unfolds() -> None:
    rng = np.random.default_rng(5)
    words = [None, *("é" * int(n) for n in rng.integers(0, 9, 12))]
    for _ in range(50):
        flat = [words[n] for n in rng.integers(0, len(words), 40)]
        ends = np.sort(rng.integers(0, 40, 9))
        parts = [flat[a:b] for a, b in zip([0, *ends.tolist()], [*ends.tolist(), 40], strict=True)]
        lists = [None if rng.random() < 0.2 else part for part in parts]
        expected = [sum(len((text or "").encode()) for text in part or []) for part in lists]
        for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
            plain = pa.array(lists, pa.list_(pa.string()))
            offsets = pa.array([*np.cumsum([0, *(len(part or []) for part in lists)])], pa.int32())
            values = pa.array([text for part in lists for text in part or []], pa.string())
            values = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
            array = pa.ListArray.from_arrays(offsets, values, mask=plain.is_null())
            assert string_bytes(array).tolist() == expected
            assert string_bytes(array[3:7]).tolist() == expected[3:7]
            both = pa.StructArray.from_arrays([array, pa.array(range(len(array)))], ["a", "b"])
            assert string_bytes(both[2:]).tolist() == expected[2:]
            assert string_bytes(array.flatten()).tolist() == [
                len((text or "").encode()) for part in lists for text in part or []
            ]
    with pytest.raises(ValueError, match="values of type map<"):
        string_bytes(pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())))


@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"use_dictionary": False}])
def test_walked_pages_have_the_sizes_that_an_honest_footer_says(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "0.parquet"
    words = [f"{n % 700:05}" * 30 for n in range(5000)]
    table = pa.table({"text": words, "texts": [[word] * 2 for word in words], "n": range(5000)})
    pq.write_table(table, path, row_group_size=2000, data_page_size=4096, dictionary_pagesize_limit=40_000, **options)
    with open_parquet(path) as opened:
        metadata = opened.parquet.metadata
        for group in range(3):
            held = [metadata.row_group(group).column(n) for n in range(3)]
            found = [opened.column(group, leaf) for leaf in range(3)]
            assert [column.num_values for column in found] == [column.num_values for column in held]
            for column, said in zip(found, held, strict=True):  # the footer counts the headers of pages as well
                assert (
                    0 < said.total_uncompressed_size - column.plain_bytes < 200 * said.total_uncompressed_size // 4096
                )
                assert column.has_dictionary == ("RLE_DICTIONARY" in said.encodings)
                assert column.largest_page <= column.plain_bytes
        assert together(found).num_values == sum(column.num_values for column in held)
