"""Parquet files as shards: values as pyarrow's own reader finds them, kinds of rows, findings, hostile files."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.parquets import IMAGE, WRITERS, pairs_table, varint, write_table
from dataset.shards.parquet_datasets import JPEGS, RNG, ROWS, details, images_of, index, with_footer
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_tar

from dataserver.dataset import DatasetError, build_index, compile_filter, lint
from dataserver.dataset.shards.pages import unpack
from dataserver.dataset.shards.parquet import chunk as chunk_module
from dataserver.dataset.shards.parquet.page_header import parse_page_header

KINDS = {"struct": IMAGE, "binary": pa.binary(), "large_binary": pa.large_binary()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_values_are_those_that_arrow_reads(tmp_path: Path, writer: str, kind: str) -> None:
    rows = [*ROWS, ("again", JPEGS[3], "the same bytes")]
    path = write_table(tmp_path / "0.parquet", pairs_table(rows, KINDS[kind]), writer)
    dataset, findings = index(tmp_path)
    assert findings == {}
    table = pq.read_table(path)
    images = table["image"].to_pylist()
    assert images_of(dataset) == [[image["bytes"] if kind == "struct" else image] for image in images]
    (shard,) = dataset.shards
    assert shard.keys() == table["key"].to_pylist()
    assert [shard.parts(n).texts[0] for n in range(shard.num_samples)] == table["text"].to_pylist()
    sizes = shard.sizes()
    assert sizes.image_height.tolist() == [*(40 + n for n in range(23)), 43]


def test_plain_pages_are_read_as_members_of_a_tar_are(tmp_path: Path) -> None:
    """No byte is read that is no image's: addresses are offsets in the file."""
    path = write_table(tmp_path / "0.parquet", pairs_table(ROWS))
    dataset, _ = index(tmp_path)
    data = path.read_bytes()
    for row, jpeg in enumerate(JPEGS):
        ref = dataset.shards[0].image(row, 0)
        assert data[ref.offset : ref.offset + ref.length] == jpeg


def test_compressed_pages_are_decompressed_once_while_the_cache_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "0.parquet", pairs_table(ROWS), "zstd", data_page_size=1 << 20, row_group_size=100)
    dataset, _ = index(tmp_path)
    unpacked: list[int] = []

    def counting(*given: Any) -> bytes:
        unpacked.append(1)
        return unpack(*given)

    monkeypatch.setattr("dataserver.dataset.open_shards.unpack", counting)
    assert images_of(dataset) == [[jpeg] for jpeg in JPEGS]
    assert len(unpacked) == 1


def test_rows_without_a_key_have_numbers(tmp_path: Path) -> None:
    table = pairs_table(ROWS).drop_columns("key")
    write_table(tmp_path / "0.parquet", table)
    dataset, _ = index(tmp_path)
    assert dataset.shards[0].keys() == [f"{n:09d}" for n in range(23)]


def test_webdatasets_key_goes_first_and_keys_must_be_usable_and_unique(tmp_path: Path) -> None:
    keys = ["a/b.c", None, "../x", "a/b.c", "line\n"]
    table = pairs_table(ROWS[:5]).append_column("__key__", pa.array(keys))
    write_table(tmp_path / "0.parquet", table)
    dataset, findings = index(tmp_path)
    assert findings == {"duplicate_key": 1, "unsafe_name": 2}
    assert dataset.shards[0].keys() == ["a/b.c", "000000001", "000000002", "000000004"]
    assert "row 2: its key '../x' has a '..' part; it is called 000000002" in details(tmp_path)["unsafe_name"]


def test_scalar_columns_are_filter_columns(tmp_path: Path) -> None:
    more = {
        "score": pa.array([n / 10 for n in range(23)], pa.float32()),
        "count": pa.array(range(23), pa.uint64()),
        "day": pa.array([n * 86_400_000_000 for n in range(23)], pa.timestamp("us")),
        "source": pa.array(["a", "b"] * 11 + ["a"]).dictionary_encode(),
        "flag": [None] + [True] * 22,
        "vector": [[1.0]] * 23,
    }
    write_table(tmp_path / "0.parquet", pairs_table(ROWS, **more))
    dataset, findings = index(tmp_path)
    assert findings == {"unusable_column": 1}
    (shard,) = dataset.shards
    types = {"count": "int64", "day": "string", "flag": "bool", "score": "double", "source": "string"}
    assert dict(shard.sidecar_columns) == types
    mask = compile_filter("source == 'a' and count >= 4 and flag == true").mask(shard)
    assert np.flatnonzero(mask).tolist() == [*range(4, 23, 2)]
    assert shard.column("day").to_pylist()[1].startswith("1970-01-02")


@pytest.mark.parametrize("as_text", [False, True])
def test_a_column_of_json_is_the_json_of_a_sample(tmp_path: Path, as_text: bool) -> None:
    """As the Hub shows tars of webdataset: jpg, json, txt, __key__."""
    held = ['{"caption": "words", "punsafe": 0.25}', '{"caption": "more", "punsafe": 0.5}']
    documents = held if as_text else [{"caption": "words", "punsafe": 0.25}, {"caption": "more", "punsafe": 0.5}]
    images = pa.array([{"bytes": jpeg, "path": "x.jpg"} for jpeg in JPEGS[:2]], IMAGE)
    write_table(tmp_path / "0.parquet", pa.table({"jpg": images, "json": documents, "__key__": ["a", "b"]}))
    dataset, findings = index(tmp_path)
    assert findings == {}
    (shard,) = dataset.shards
    assert [shard.parts(n).texts for n in range(2)] == [("words",), ("more",)]
    assert shard.column("punsafe").to_pylist() == [0.25, 0.5]


def test_json_that_is_broken_costs_no_sample(tmp_path: Path) -> None:
    documents = ["{", "[1]", '{"s": "\\ud800"}', '{"n": 1}']
    write_table(tmp_path / "0.parquet", pairs_table(ROWS[:4], json=documents))
    dataset, findings = index(tmp_path)
    assert (dataset.shards[0].num_samples, findings) == (4, {"unused_part": 3})
    assert dataset.shards[0].column("n").to_pylist() == [None, None, None, 1]


def test_what_is_missing_in_a_row_is_said(tmp_path: Path) -> None:
    images = [
        {"bytes": JPEGS[0], "path": None},
        {"bytes": None, "path": "cats/1.jpg"},
        None,
        {"bytes": b"no image", "path": "x.jpg"},
        {"bytes": JPEGS[4], "path": None},
        {"bytes": b"", "path": None},
        None,
    ]
    texts = ["a", "b", "c", "d", None, "f", None]
    write_table(tmp_path / "0.parquet", pa.table({"image": pa.array(images, IMAGE), "caption": texts}))
    dataset, findings = index(tmp_path)
    assert dataset.shards[0].num_samples == 1
    assert findings == {"missing_caption": 2, "missing_image": 1, "orphan_text": 1, "unreadable_header": 2}
    assert "the row names 'cats/1.jpg' and holds no bytes" in details(tmp_path)["missing_image"]
    assert lint(tmp_path).quarantine.keys == {"0.parquet": frozenset(f"{n:09d}" for n in range(1, 7))}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_columns_of_the_wrong_type_are_no_text_datasets(tmp_path: Path, kind: pa.DataType) -> None:
    paths = pa.array(["a.jpg", "b.jpg"], kind)
    of_categories = pa.array(["a.jpg", "b.jpg"]).dictionary_encode()
    for name, column in (("plain", paths), ("categories", of_categories)):
        (tmp_path / name).mkdir()
        write_table(tmp_path / name / "0.parquet", pa.table({"image": column, "text": ["a", "b"]}))
        dataset, findings = index(tmp_path / name)
        assert (dataset.shards[0].num_samples, findings) == (0, {"missing_image": 2})
        said = details(tmp_path / name)["missing_image"]
        assert said.endswith(f"column image holds no bytes, it is of type {column.type}")


def test_bytes_that_are_categories_are_images(tmp_path: Path) -> None:
    images = pa.array(JPEGS[:2], pa.binary()).dictionary_encode()
    write_table(tmp_path / "0.parquet", pa.table({"image": images, "text": ["a", "b"]}))
    dataset, findings = index(tmp_path)
    assert findings == {}
    assert [dataset.read(dataset.shards[0].image(row, 0)) for row in range(2)] == JPEGS[:2]


def test_a_file_without_a_caption_column_says_which_it_needs(tmp_path: Path) -> None:
    write_table(tmp_path / "0.parquet", pairs_table(ROWS[:2]).rename_columns(["key", "image", "english"]))
    _, findings = index(tmp_path)
    assert findings == {"missing_caption": 2}
    assert "no column of strings is called txt or text or caption" in details(tmp_path)["missing_caption"]


def test_texts_alone(tmp_path: Path) -> None:
    write_table(tmp_path / "0.parquet", pa.table({"text": ["a", "b"], "blob": [b"x", b"y"], "bytes": [1, 2]}))
    dataset, findings = index(tmp_path)
    assert findings == {"unusable_column": 1}
    assert [dataset.shards[0].parts(n).texts for n in range(2)] == [("a",), ("b",)]


def test_several_images_of_a_row_are_named_as_in_a_tar(tmp_path: Path) -> None:
    lists = [[JPEGS[0]], [JPEGS[1], JPEGS[2]], [], None, [b"broken", JPEGS[3]]]
    images = [one if one is None else [{"bytes": jpeg, "path": None} for jpeg in one] for one in lists]
    table = pa.table(
        {
            "images": pa.array(images, pa.list_(IMAGE)),
            "text": list("abcde"),
            "second": pa.array([None] * 4 + [JPEGS[4]]),
        }
    )
    write_table(tmp_path / "0.parquet", table)
    dataset, findings = index(tmp_path)
    assert findings == {"extra_image": 2, "orphan_text": 2, "unused_part": 1}
    assert images_of(dataset) == [[JPEGS[0]], [JPEGS[1]], [JPEGS[3]]]


@pytest.mark.parametrize("writer", WRITERS)
def test_documents_are_lists_of_texts_and_images(tmp_path: Path, writer: str) -> None:
    texts = [["one", None, "two", None], [None], ["words"], ["x", None]]
    images = [
        [None, {"bytes": JPEGS[0], "path": "a"}, None, {"bytes": JPEGS[1], "path": "b"}],
        [{"bytes": JPEGS[2], "path": None}],
        [None],
        [None, {"bytes": None, "path": "c.jpg"}],
    ]
    table = pa.table({"images": pa.array(images, pa.list_(IMAGE)), "texts": texts, "key": list("abcd")})
    write_table(tmp_path / "0.parquet", table, writer)
    dataset, findings = index(tmp_path)
    assert findings == {"missing_image": 1}
    assert images_of(dataset) == [[JPEGS[0], JPEGS[1]], [JPEGS[2]], []]
    assert dataset.shards[0].parts(0).kinds == (0, 1, 0, 1)


def test_texts_that_are_not_utf8_are_findings(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"\xff\xfe", b"fine"]).cast(pa.binary()).view(pa.string())
    table = pairs_table(ROWS[:3]).drop_columns("text").append_column("text", bad).append_column("other", bad)
    write_table(tmp_path / "0.parquet", table)
    dataset, findings = index(tmp_path)
    assert findings == {"not_utf8": 1, "odd_values": 1}
    assert dataset.shards[0].column("other").to_pylist() == ["good", "fine"]


def test_pages_that_cost_too_much_are_named_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "MAX_PAGE_BYTES", 1000)
    monkeypatch.setattr(chunk_module, "MAX_FRAGMENTED_BYTES", 1000)
    rows = [*ROWS[:3], ("none", None, "text")]
    for name, options in {
        "large": {"compression": "zstd"},
        "v2": {"compression": "zstd", "data_page_version": "2.0"},
        "dictionary": {"compression": "snappy", "use_dictionary": True},
        "brotli": {"compression": "brotli"},
        "delta": {"column_encoding": {"image": "DELTA_BYTE_ARRAY"}},
    }.items():
        write_table(tmp_path / name / "0.parquet", pairs_table(rows, pa.binary()), **options)
        dataset, findings = index(tmp_path / name)
        assert dataset.shards[0].num_samples == 0
        assert findings["needs_convert"] >= 3, name
        assert sum(findings.values()) == 4, findings


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_an_encoding_that_is_not_read_is_named(tmp_path: Path, encoding: str) -> None:
    write_table(tmp_path / "0.parquet", pairs_table(ROWS, pa.binary()), column_encoding={"image": encoding})
    _, findings = index(tmp_path)
    assert findings == {"needs_convert": len(ROWS)}
    assert f"encoded as {encoding}; " in details(tmp_path)["needs_convert"]


@pytest.mark.parametrize("has_dictionary", [False, True])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_large_pages_of_snappy_are_read_by_their_fragments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_dictionary: bool, version: str
) -> None:
    """As pyarrow writes them by default; a value costs 64 KiB that are decompressed around it, or nothing."""
    jpegs = [jpeg + RNG.bytes(40_000) + bytes(30_000) for jpeg in JPEGS]
    rows = [(f"{n}", jpeg, "text") for n, jpeg in enumerate(jpegs)]
    options = {"use_dictionary": has_dictionary, "data_page_version": version, "row_group_size": 100}
    monkeypatch.setattr(chunk_module, "MAX_PAGE_BYTES", 100_000)
    write_table(tmp_path / "0.parquet", pairs_table(rows), "pyarrow", **options)
    dataset, findings = index(tmp_path)
    assert findings == {}
    unpacked: list[int] = []

    def counting(data: bytes, plain_bytes: int, codec: str) -> bytes:
        unpacked.append(plain_bytes)
        return unpack(data, plain_bytes, codec)

    monkeypatch.setattr("dataserver.dataset.open_shards.unpack", counting)
    assert images_of(dataset) == [[jpeg] for jpeg in jpegs]
    assert unpacked
    assert max(unpacked) <= 65_536


def test_a_large_page_of_one_value_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "MAX_PAGE_BYTES", 100)
    options = {"data_page_size": 1, "write_batch_size": 1}
    write_table(tmp_path / "0.parquet", pairs_table(ROWS), "zstd", **options)
    dataset, findings = index(tmp_path)
    assert findings == {}
    assert images_of(dataset) == [[jpeg] for jpeg in JPEGS]


def test_a_dataset_of_tars_reads_no_parquet_but_its_sidecars(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.jpg", JPEGS[0]), ("a.txt", b"words")])
    write_table(tmp_path / "1.parquet", pairs_table(ROWS))
    dataset, findings = index(tmp_path)
    assert ([shard.name for shard in dataset.shards], findings) == (["0.tar"], {"unread_file": 1})
    assert "a folder of their own" in details(tmp_path)["unread_file"]


# Hostile files


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + bytes(100) + b"PAR1", b"PARE" + bytes(99) + b"PARE"]
)
def test_what_is_no_parquet_is_one_finding(tmp_path: Path, data: bytes) -> None:
    write_table(tmp_path / "0.parquet", pairs_table(ROWS))
    (tmp_path / "1.parquet").write_bytes(data)
    report = build_index(tmp_path, workers=1)
    assert report.num_samples == 23
    assert report.findings == {"needs_convert" if data[:4] == b"PARE" else "corrupt_parquet": 1}


def test_a_cut_footer_is_one_finding(tmp_path: Path) -> None:
    path = write_table(tmp_path / "0.parquet", pairs_table(ROWS))
    data = path.read_bytes()
    for length in (len(data) - 1, len(data) - 9, len(data) // 2, 10):
        path.write_bytes(data[:length])
        dataset, findings = index(tmp_path)
        assert (dataset.shards[0].num_samples, findings) == (0, {"corrupt_parquet": 1})


def test_pages_and_values_that_lie_cost_the_rows_behind_them_and_no_others(tmp_path: Path) -> None:
    path = write_table(tmp_path / "0.parquet", pairs_table(ROWS), row_group_size=8)
    good = path.read_bytes()
    first = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    header, length = parse_page_header(good[first : first + 65_536])
    values = good.index(JPEGS[8]) - 4
    lies = {
        "a value runs past its page": (values, (1 << 30).to_bytes(4, "little"), 15),
        "a value is larger than its page by one": (values, (header.packed_bytes - 10).to_bytes(4, "little"), 15),
        "levels are longer than the page": (first + length, (1 << 30).to_bytes(4, "little"), 15),
        "no header": (first, bytes(length), 15),
    }
    for name, (at, lie, num_good) in lies.items():
        path.write_bytes(good[:at] + lie + good[at + len(lie) :])
        dataset, findings = index(tmp_path)
        assert findings == {"corrupt_parquet": 23 - num_good}, name
        (shard,) = dataset.shards
        assert shard.keys() == [key for n, (key, _, _) in enumerate(ROWS) if n // 8 != 1], name
        assert "row group 1" in details(tmp_path)["corrupt_parquet"]


def test_a_row_group_whose_texts_cannot_be_walked_costs_the_file(tmp_path: Path) -> None:
    """Also where rows before it were read, and where another one ends the reading before. What Arrow alone cannot read
    costs the rows from there on."""
    path = write_table(tmp_path / "0.parquet", pairs_table(ROWS), row_group_size=8)
    good, metadata = path.read_bytes(), pq.ParquetFile(path).metadata
    (leaf,) = (n for n in range(4) if metadata.schema.column(n).path == "text")
    headers = [metadata.row_group(group).column(leaf).data_page_offset for group in range(3)]
    no_length = good.index(b"text 8") - 4

    def count(*lies: tuple[int, bytes]) -> tuple[int, dict[str, int]]:
        data = bytearray(good)
        for at, lie in lies:
            data[at : at + len(lie)] = lie
        path.write_bytes(data)
        dataset, findings = index(tmp_path)
        return dataset.shards[0].num_samples, findings

    for header in headers:
        assert count((header, bytes(20))) == (0, {"corrupt_parquet": 1})
    assert count((no_length, b"\xff" * 4)) == (8, {"corrupt_parquet": 1})
    assert count((no_length, b"\xff" * 4), (headers[2], bytes(20))) == (0, {"corrupt_parquet": 1})
    assert "the rest of the file cannot be read: " in details(tmp_path)["corrupt_parquet"]
    path.write_bytes(good)
    with_footer(path, b"\x16" + varint(2 * 8), b"\x16\x00")
    assert pq.ParquetFile(path).metadata.row_group(1).num_rows == 0
    good = path.read_bytes()
    assert count()[0] == 15
    assert count((headers[1], bytes(20))) == (0, {"corrupt_parquet": 1}), "also where a row group has no rows"


def test_counts_that_differ_from_the_footer_cost_the_row_group(tmp_path: Path) -> None:
    """The same length of the number, another value: one less."""
    path = write_table(tmp_path / "0.parquet", pairs_table(ROWS))
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    header, length = parse_page_header(bytes(data[at : at + 65_536]))
    assert header.num_values == 7
    where = data.index(bytes([2 * 7]), at, at + length)
    data[where] = 2 * 6
    path.write_bytes(data)
    _, findings = index(tmp_path)
    assert findings["corrupt_parquet"] == 7


def test_columns_that_overlap_are_refused(tmp_path: Path) -> None:
    """A footer that gives two columns of images the same bytes."""
    table = pa.table({"image": pa.array(JPEGS[:2]), "jpg": pa.array(JPEGS[2:4]), "text": ["a", "b"]})
    path = write_table(tmp_path / "0.parquet", table)
    data = path.read_bytes()
    held = pq.ParquetFile(path).metadata.row_group(0)
    starts = [held.column(n).data_page_offset for n in range(2)]
    spelled = [varint(2 * start) for start in starts]
    footer = data.index(b"image", starts[1] + 10)
    assert starts[0] == 4
    lying = data[:footer] + data[footer:].replace(spelled[1], varint(2 * 5).ljust(0), 1)
    if len(spelled[1]) != 1:
        padded = bytes([0x80 | (10 & 0x7F), *[0x80] * (len(spelled[1]) - 2), 0])
        lying = data[:footer] + data[footer:].replace(spelled[1], padded)
    path.write_bytes(lying)
    dataset, findings = index(tmp_path)
    assert dataset.shards[0].num_samples == 0
    assert "overlap each other" in details(tmp_path)["corrupt_parquet"], findings


@settings(max_examples=200)
@given(st.data())
def test_any_damage_of_pages_is_a_finding_or_serves_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    writer = data.draw(st.sampled_from(sorted(WRITERS)))
    folder = tmp_path_factory.mktemp("damaged")
    path = write_table(folder / "0.parquet", pairs_table(ROWS), writer)
    metadata = pq.ParquetFile(path).metadata
    held = metadata.row_group(data.draw(st.integers(0, metadata.num_row_groups - 1))).column(1)
    start = held.dictionary_page_offset or held.data_page_offset
    damaged = bytearray(path.read_bytes())
    at = start + data.draw(st.one_of(st.integers(0, 40), st.integers(0, held.total_compressed_size - 1)))
    damaged[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    dataset, findings = index(folder)
    (shard,) = dataset.shards
    assert shard.num_samples + sum(findings.values()) >= 23
    assert [shard.image(n, 0).length for n in range(shard.num_samples)] == [len(*image) for image in images_of(dataset)]


def test_times_that_python_does_not_have_are_one_finding(tmp_path: Path) -> None:
    held = pa.array([{"at": 1 << 62}] * 2, pa.struct([("at", pa.timestamp("us"))]))
    write_table(tmp_path / "0.parquet", pairs_table(ROWS[:2], json=held))
    assert index(tmp_path)[1] == {"corrupt_parquet": 1}


def test_files_and_row_groups_without_rows_are_no_finding(tmp_path: Path) -> None:
    table = pairs_table(ROWS)
    with pq.ParquetWriter(tmp_path / "0.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0)):
            writer.write_table(part)
    pq.write_table(table.slice(0, 0), tmp_path / "1.parquet")
    report = build_index(tmp_path, workers=1)
    assert (report.num_samples, report.findings) == (23, {})


def test_documents_may_have_other_columns_of_bytes_before_their_images(tmp_path: Path) -> None:
    images = [[None, {"bytes": JPEGS[0], "path": None}]]
    columns = {"id": [b"1"], "Images": pa.array(images, pa.list_(IMAGE)), "texts": [["one", None]]}
    write_table(tmp_path / "0.parquet", pa.table(columns))
    dataset, findings = index(tmp_path)
    assert findings == {"unusable_column": 1}
    assert images_of(dataset) == [[JPEGS[0]]]
    assert dataset.shards[0].parts(0).kinds == (0, 1)


def test_a_shard_that_changes_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "0.parquet", pairs_table(ROWS), "zstd")
    dataset, _ = index(tmp_path)
    write_table(path, pairs_table(ROWS[::-1]), "zstd")
    with pytest.raises(DatasetError, match=r"index"):
        dataset.read(dataset.shards[0].image(0, 0))
