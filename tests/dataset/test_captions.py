"""Named captions, several images and keys: what is indexed by which rule, and what is said of the rest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.parquets import pairs_table, write_table
from shards import make_image, write_tar

from dataserver.assembly import load_tokenizer
from dataserver.dataset import (
    CaptionError,
    Dataset,
    DatasetError,
    IndexRules,
    KeyEnd,
    SeveralImages,
    TokensMissingError,
    build_index,
    compile_filter,
    count_tokens,
    lint,
    parse_captions,
    texts_key,
)
from dataserver.dataset.shards.members import MAX_TEXT_BYTES

JPEG = make_image(np.random.default_rng(0), 32, 32)
WIDE = make_image(np.random.default_rng(0), 64, 32)
TALL = make_image(np.random.default_rng(0), 32, 64)
BYTES = load_tokenizer("bytes")


def index(folder: Path, *captions: str, **rules: Any) -> Dataset:
    sources = parse_captions(captions)
    build_index(folder, workers=1, rules=IndexRules(captions=sources, **rules))
    for name in ("own", *(source.name for source in sources)):
        count_tokens(folder, BYTES, caption=name)
    return Dataset.open(folder)


def texts(dataset: Dataset, caption: str) -> list[list[str]]:
    key = texts_key(BYTES.digest, caption)
    found = [shard.document(row, key).texts for shard in dataset.shards for row in range(shard.num_samples)]
    return [[bytes(ids.tolist()).decode() for ids in each] for each in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards; a document among pairs, captions in members, in JSON and in a parquet, some of them missing."""
    document = {"texts": ["one", None, "two"], "images": [None, "2.jpg", None]}
    first = [
        ("0.jpg", JPEG), ("0.txt", b"own 0"), ("0.recaption.json", json.dumps({"long": "long 0", "n": 3}).encode()),
        ("0.short.txt", b"\xef\xbb\xbfshort 0"),
        ("1.jpg", JPEG), ("1.txt", b"own 1"), ("1.recaption.json", b'{"long": " "}'), ("1.short.txt", b"short 1"),
        ("2.jpg", JPEG), ("2.json", json.dumps(document).encode()), ("2.short.txt", b"short 2"),
        ("3.jpg", JPEG), ("3.short.txt", b"short 3"),
        ("4.jpg", JPEG), ("4.txt", b"own 4"), ("4.recaption.json", b"{"), ("4.json", b'{"alt": "alt 4"}'),
    ]  # fmt: skip
    write_tar(tmp_path / "d" / "0.tar", first)
    write_tar(tmp_path / "d" / "1.tar", [("5.jpg", JPEG), ("5.txt", b"own 5"), ("5.json", b'{"alt": "alt 5"}')])
    rows = {"key": ["0", "2", "4"], "model": ["table 0", "table 2", ""], "score": [1.0, 2.0, 3.0]}
    pq.write_table(pa.table(rows), tmp_path / "d" / "0.parquet")
    return tmp_path / "d"


CAPTIONS = ("long=recaption.json:long", "short=.short.TXT", "alt=json:alt", "table=parquet:model")


def test_each_caption_stands_for_the_text_of_samples_that_have_it(folder: Path) -> None:
    dataset = index(folder, *CAPTIONS)
    assert dataset.captions == ["alt", "long", "short", "table"]
    document = ["one", "two"]
    assert texts(dataset, "own") == [["own 0"], ["own 1"], document, ["short 3"], ["own 4"], ["own 5"]]
    assert texts(dataset, "long") == [["long 0"], ["own 1"], document, ["short 3"], ["own 4"], ["own 5"]]
    assert texts(dataset, "short") == [["short 0"], ["short 1"], document, ["short 3"], ["own 4"], ["own 5"]]
    assert texts(dataset, "alt") == [["own 0"], ["own 1"], document, ["short 3"], ["alt 4"], ["alt 5"]]
    assert texts(dataset, "table") == [["table 0"], ["own 1"], document, ["short 3"], ["own 4"], ["own 5"]]
    shard = dataset.shards[0]
    assert shard.keep(compile_filter('"caption.long" is not null')).tolist() == [True, False, False, False, False]
    assert shard.tokens.counts(texts_key(BYTES.digest, "short")).tolist() == [7, 7, 3, 3, 7, 5]


def test_samples_that_lack_a_caption_and_broken_parts_are_findings(folder: Path) -> None:
    index(folder, *CAPTIONS)
    found = lint(folder)
    said = {(f.shard, f.detail) for f in found.findings if f.kind == "missing_named_caption"}
    end = "jobs that ask for it read their own text"
    assert said == {
        ("0.tar", f"3 of 5 samples have no caption alt (json:alt), the first is '0'; {end}"),
        ("0.tar", f"3 of 5 samples have no caption long (recaption.json:long), the first is '1'; {end}"),
        ("0.tar", f"1 of 5 samples have no caption short (short.txt), the first is '4'; {end}"),
        ("0.tar", f"3 of 5 samples have no caption table (parquet:model), the first is '1'; {end}"),
        ("1.tar", f"1 of 1 samples have no caption long (recaption.json:long), the first is '5'; {end}"),
        ("1.tar", f"1 of 1 samples have no caption short (short.txt), the first is '5'; {end}"),
        ("1.tar", f"1 of 1 samples have no caption table (parquet:model), the first is '5'; {end}"),
    }
    (unused,) = [f for f in found.findings if f.kind == "unused_part"]
    assert (unused.key, unused.detail.startswith("4.recaption.json: JSONDecodeError")) == ("4", True)
    assert found.num_samples == 6


def test_captions_are_part_of_the_fingerprint_and_asked_for_by_name(folder: Path) -> None:
    plain = index(folder)
    assert plain.captions == []
    both = index(folder, *CAPTIONS)
    assert both.fingerprint != plain.fingerprint
    assert index(folder, *reversed(CAPTIONS)).fingerprint == both.fingerprint
    assert index(folder, *CAPTIONS[:3]).fingerprint != both.fingerprint
    both.check_captions(["own", "long"])
    with pytest.raises(CaptionError, match=r"'huge', the index has \['own', 'alt', 'long', 'short', 'table'\]"):
        both.check_captions(["huge"])


def test_a_caption_is_counted_for_each_tokenizer(folder: Path) -> None:
    build_index(folder, workers=1, rules=IndexRules(captions=parse_captions(CAPTIONS)))
    count_tokens(folder, BYTES)
    with pytest.raises(TokensMissingError, match=r"is not counted for the tokenizer .* caption long; run"):
        texts(Dataset.open(folder), "long")


@pytest.mark.parametrize(
    "source", ["long=nowhere.txt", "long=recaption.json:nothing", "long=parquet:nothing", "l=json:n"]
)
def test_a_caption_that_nobody_has_is_one_clear_error(folder: Path, source: str) -> None:
    with pytest.raises(CaptionError, match=r"no sample of .* has the caption l(ong)? \(.*correct the extension"):
        index(folder, source)


def test_a_column_of_a_sidecar_that_is_never_read_is_said(folder: Path) -> None:
    with pytest.raises(CaptionError, match=r"columns \['caption', 'exif', 'key'\] beside a tar are not read: rename"):
        index(folder, "page=parquet:caption")


def test_a_column_that_holds_no_texts_is_refused(folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"--caption c=parquet:score: the column 'score' of .*0.parquet is double"):
        index(folder, "c=parquet:score")


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["long"], "--caption long: NAME=MEMBER, NAME=MEMBER:KEY of a JSON member, or NAME=parquet:COLUMN is required"),
        (["=x.txt"], "a caption is called ''"),
        (["own=x.txt"], "a caption is called 'own'"),
        (["a b=x.txt"], "a caption is called 'a b'"),
        (["a="], "is required"),
        (["a=json"], "is required"),
        (["a=parquet"], "is required"),
        (["a=b/c.txt"], "is required"),
        (["a=b.txt", "a=c.txt"], "--caption names 'a' twice"),
        ([f"c{n}=x.txt" for n in range(17)], "--caption is given 17 times, the limit is 16"),
    ],
)
def test_what_a_caption_must_look_like(entries: list[str], problem: str) -> None:
    with pytest.raises(DatasetError) as caught:
        parse_captions(entries)
    assert problem in str(caught.value)


def test_a_column_called_like_a_caption_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.jpg", JPEG), ("0.txt", b"a"), ("0.x.txt", b"b")])
    pq.write_table(pa.table({"key": ["0"], "caption.long": ["c"]}), tmp_path / "0.parquet")
    assert index(tmp_path, "short=x.txt").captions == ["short"], "a column of the sidecar is no caption"
    with pytest.raises(DatasetError, match=r"has a column 'caption\.long', as the caption 'long' would be stored"):
        index(tmp_path, "long=x.txt")


MANY = [
    ("a.jpg", JPEG), ("a.10.jpg", WIDE), ("a.2.jpg", TALL), ("a.txt", b"text"),
    ("b.0.jpg", WIDE), ("b.1.jpg", JPEG), ("b.txt", b"text"),
    ("c.0.jpg", WIDE), ("c.1.jpg", b"no image"), ("c.txt", b"text"),
    ("d.jpg", JPEG), ("d.txt", b"text"),
]  # fmt: skip


def sizes(dataset: Dataset) -> list[list[tuple[int, int]]]:
    (shard,) = dataset.shards
    return [
        [(ref.width, ref.height) for ref in (shard.image(row, i) for i in range(shard.parts(row).kinds.count(1)))]
        for row in range(shard.num_samples)
    ]


def test_all_images_of_a_sample_come_by_name_before_its_text(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", MANY)
    first = index(tmp_path)
    assert (first.shards[0].keys(), sizes(first)) == (
        ["a", "b", "c", "d"],
        [[(32, 32)], [(64, 32)], [(64, 32)], [(32, 32)]],
    )
    assert lint(tmp_path).counts == {"extra_image": 2, "unused_part": 1}
    every = index(tmp_path, several_images=SeveralImages.ALL)
    assert every.shards[0].keys() == ["a", "b", "d"]
    assert sizes(every) == [[(32, 32), (32, 64), (64, 32)], [(64, 32), (32, 32)], [(32, 32)]]
    assert [every.shards[0].parts(row).kinds for row in range(3)] == [(1, 1, 1, 0), (1, 1, 0), (1, 0)]
    assert lint(tmp_path).counts == {"unreadable_header": 1}
    assert every.fingerprint != first.fingerprint


def test_keys_end_at_the_first_dot_or_at_the_last(tmp_path: Path) -> None:
    members = [("v1.5.jpg", JPEG), ("v1.5.txt", b"a"), ("v1.6.jpg", WIDE), ("v1.6.txt", b"b"), ("x/.hidden", b"")]
    write_tar(tmp_path / "0.tar", members)
    dataset = index(tmp_path, key=KeyEnd.LAST_DOT)
    assert dataset.shards[0].keys() == ["v1.5", "v1.6"]
    assert texts(dataset, "own") == [["a"], ["b"]]
    assert lint(tmp_path).counts == {}
    report = build_index(tmp_path, workers=1)
    assert (report.num_samples, dict(report.findings)) == (0, {"missing_caption": 1})


def test_captions_of_parquet_shards_are_columns_and_entries_of_json(tmp_path: Path) -> None:
    table = pairs_table(
        [(f"k{n}", JPEG, f"own {n}") for n in range(3)],
        blip=["blip 0", None, " "],
        caption=["page 0", "page 1", "page 2"],
        score=[0.5, 0.25, 1.0],
        json=['{"long": "long 0"}', "{", '{"long": 3}'],
    )
    write_table(tmp_path / "0.parquet", table)
    dataset = index(tmp_path, "blip=parquet:blip", "page=parquet:caption", "long=json:long", "same=json:blip")
    assert dataset.captions == ["blip", "long", "page", "same"]
    assert texts(dataset, "blip") == texts(dataset, "same") == [["blip 0"], ["own 1"], ["own 2"]]
    assert texts(dataset, "page") == [["page 0"], ["page 1"], ["page 2"]]
    assert texts(dataset, "long") == [["long 0"], ["own 1"], ["own 2"]]
    assert lint(tmp_path).counts == {"missing_named_caption": 3, "odd_values": 1, "unused_part": 1}
    with pytest.raises(DatasetError, match=r"--caption c=parquet:score: the column 'score' of \S+0.parquet is double"):
        index(tmp_path, "c=parquet:score")
    write_table(tmp_path / "0.parquet", table.append_column("caption.x", table["blip"]))
    with pytest.raises(DatasetError, match=r"0.parquet has a column 'caption\.x'"):
        index(tmp_path, "x=parquet:blip")


LISTS = [["a 0", "b 0"], ["a 1"], [" ", "b 2"], None, []]
DRAWN = {"c0": [["a 0"], ["a 1"], ["b 2"]], "c1": [["b 0"], ["a 1"], ["b 2"]]}
"""Texts that jobs read; one that lacks the caption has the first one as its own."""


def test_elements_of_lists_are_captions(tmp_path: Path) -> None:
    images = [{"bytes": JPEG, "path": None}] * 5
    columns = {"image": images, "caption": LISTS, "tags": [["x"]] * 5, "literal[0]": ["l"] * 5}
    write_table(tmp_path / "parquet/0.parquet", pa.table(columns))
    lines = [{"image": "0.jpg", "caption": found} for found in LISTS]
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/0.jpg").write_bytes(JPEG)
    (tmp_path / "lines/0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    members = [(f"{n}.{name}", data) for n, line in enumerate(lines)
               for name, data in (("jpg", JPEG), ("json", json.dumps(line).encode()))]  # fmt: skip
    write_tar(tmp_path / "tar/0.tar", members)
    for name, part in (("parquet", "parquet"), ("lines", "json"), ("tar", "json")):
        dataset = index(tmp_path / name, *(f"c{n}={part}:caption[{n}]" for n in range(2)))
        assert {caption: texts(dataset, caption) for caption in DRAWN} == DRAWN, name
        counts = {"missing_caption": 2, "missing_named_caption": 2}
        assert lint(tmp_path / name).counts == counts | ({"unusable_column": 1} if part == "parquet" else {}), name
    dataset = index(tmp_path / "parquet", "l=parquet:literal[0]")
    assert texts(dataset, "l") == [["l"]] * 5, "a column of that very name goes before an element"
    with pytest.raises(CaptionError, match="no sample of"):
        index(tmp_path / "parquet", "c=parquet:caption[2]")


def test_a_list_of_captions_is_named_with_the_flag_that_reads_it(tmp_path: Path) -> None:
    images = [{"bytes": JPEG, "path": None}] * 2
    write_table(tmp_path / "p/0.parquet", pa.table({"image": images, "captions": [["a"], ["b"]]}))
    build_index(tmp_path / "p", workers=1)
    found = lint(tmp_path / "p")
    assert found.counts == {"missing_caption": 2, "unusable_column": 1}
    assert all("--caption 'NAME=parquet:captions[0]'" in finding.detail for finding in found.findings)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/0.jpg").write_bytes(JPEG)
    (tmp_path / "m/0.jsonl").write_text('{"image": "0.jpg", "text": ["a"], "json": [1]}')
    build_index(tmp_path / "m", workers=1)
    found = lint(tmp_path / "m")
    assert found.counts == {"missing_caption": 1, "unused_part": 1}
    details = {finding.kind: finding.detail for finding in found.findings}
    assert "--caption 'NAME=json:text[0]'" in details["missing_caption"]
    assert "json: is a list, not an object" in details["unused_part"]
    write_tar(tmp_path / "t/0.tar", [("0.jpg", JPEG), ("0.txt", b"a")])
    pq.write_table(pa.table({"key": ["0"], "captions": [["b"]]}), tmp_path / "t/0.parquet")
    with pytest.raises(CaptionError, match="lists are read in Parquet with images, not in a parquet beside a tar"):
        index(tmp_path / "t", "c=parquet:captions[0]")


def test_rows_without_a_text_of_their_own_have_the_first_named_caption(tmp_path: Path) -> None:
    table = pairs_table([(f"k{n}", JPEG, None) for n in range(3)], b=["b 0", None, None], a=["a 0", "a 1", None])
    write_table(tmp_path / "0.parquet", table.drop_columns("text"))
    dataset = index(tmp_path, "b=parquet:b", "c=parquet:a")
    assert texts(dataset, "own") == [["b 0"], ["a 1"]]
    assert lint(tmp_path).counts == {"missing_caption": 1, "missing_named_caption": 1}


def test_columns_of_a_joined_file_are_captions_of_a_parquet_shard(tmp_path: Path) -> None:
    write_table(tmp_path / "d" / "0.parquet", pairs_table([("k0", JPEG, "own 0"), ("k1", JPEG, "own 1")]))
    write_table(tmp_path / "more" / "0.parquet", pa.table({"key": ["k1"], "blip": ["blip 1"]}))
    dataset = index(tmp_path / "d", "blip=parquet:blip", joins=(tmp_path / "more",))
    assert texts(dataset, "blip") == [["own 0"], ["blip 1"]]


def test_a_row_has_no_longer_texts_than_a_member(tmp_path: Path) -> None:
    long = "x" * (MAX_TEXT_BYTES + 1)
    table = pairs_table(
        [(f"k{n}", JPEG, f"own {n}") for n in range(3)], a=[long, "a 1", "a 2"], json=[None, json.dumps(long), None]
    )
    write_table(tmp_path / "0.parquet", table)
    dataset = index(tmp_path, "a=parquet:a")
    assert texts(dataset, "a") == [["own 0"], ["a 1"], ["a 2"]]
    found = [f.detail for f in lint(tmp_path).findings if f.kind == "unused_part"]
    assert sorted(detail.partition(" (")[2].partition(")")[0] for detail in found) == ["text_too_large"] * 2
    documents = {"texts": [[long, None], ["a", None]], "images": [[None, {"bytes": JPEG}], [None, {"bytes": JPEG}]]}
    write_table(tmp_path / "0.parquet", pa.table(documents))
    assert texts(index(tmp_path), "own") == [["a"]]
    assert lint(tmp_path).counts == {"text_too_large": 1}


def test_a_member_called_parquet_is_no_caption(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.jpg", JPEG), ("0.txt", b"a"), ("0.parquet", b'{"model": "b"}')])
    with pytest.raises(CaptionError, match="no sample of"):
        index(tmp_path, "c=parquet:model")
    assert lint(tmp_path).counts == {"missing_named_caption": 1}
