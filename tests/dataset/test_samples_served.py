"""What decides the samples of a dataset: metadata that meets them, lone texts, copies, rules of other releases."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import make_image, write_pairs, write_tar, write_texts

from dataserver.dataset import (
    Dataset,
    DatasetError,
    IndexRules,
    MetadataKeys,
    StaleIndexError,
    TextOnly,
    build_index,
    compile_filter,
    lint,
)
from dataserver.dataset.index import rules as rules_module
from dataserver.dataset.index.copies import ALLOWED_NAME
from dataserver.images import ImageFault

JPEG = make_image(np.random.default_rng(0), 64, 48)
DEFAULT = IndexRules()
ALLOW = IndexRules(text_only=TextOnly.ALLOW)


def pairs(*keys: str) -> list[tuple[str, bytes]]:
    return [member for key in keys for member in ((f"{key}.jpg", JPEG), (f"{key}.txt", b"words"))]


def sidecar(path: Path, keys: list[str | None], **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"key": pa.array(keys, pa.string()), **columns}), path)


def index(folder: Path, rules: IndexRules = DEFAULT) -> tuple[int, dict[str, int]]:
    report = build_index(folder, workers=1, rules=rules)
    assert dict(lint(folder).counts) == report.findings
    return report.num_samples, dict(report.findings)


def details(folder: Path) -> dict[str, str]:
    """The last finding of each kind."""
    return {finding.kind: finding.detail for finding in lint(folder).findings}


def keys_of(folder: Path) -> list[str]:
    return [key for shard in Dataset.open(folder).shards for key in list(shard.keys())]


def test_rows_that_meet_no_sample_at_all_are_refused_with_both_spellings(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs("00000/000", "00000/001"))
    sidecar(tmp_path / "0.parquet", ["000", "001"], score=[0.1, 0.9])
    with pytest.raises(DatasetError, match=r"'00000/000' where .* say '000'.*--metadata-keys last-part"):
        build_index(tmp_path, workers=1)
    assert index(tmp_path, IndexRules(metadata_keys=MetadataKeys.LAST_PART)) == (2, {})
    (shard,) = Dataset.open(tmp_path).shards
    assert shard.column("score").to_pylist() == [0.1, 0.9]


def test_rows_of_another_shard_are_refused_without_false_advice(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs("a"))
    sidecar(tmp_path / "0.parquet", ["b"])
    with pytest.raises(DatasetError, match=r"put the 0\.parquet beside it that was written with it"):
        build_index(tmp_path, workers=1)


def test_a_row_of_a_sample_that_is_left_out_is_not_given_to_another_one(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("x/1.jpg", b"broken"), ("x/1.txt", b"words"), *pairs("y/1", "y/2")])
    sidecar(tmp_path / "0.parquet", ["1", "2"], score=[1.0, 2.0])
    counts = index(tmp_path, IndexRules(metadata_keys=MetadataKeys.LAST_PART))[1]
    assert counts == {"sample_without_row": 1, "row_without_sample": 1, "unreadable_header": 1}
    assert Dataset.open(tmp_path).shards[0].column("score").to_pylist() == [None, 2.0]


def test_ambiguous_last_parts_find_no_row(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs("x/1", "y/1", "x/2"))
    sidecar(tmp_path / "0.parquet", ["1", "2"], score=[1.0, 2.0])
    found = index(tmp_path, IndexRules(metadata_keys=MetadataKeys.LAST_PART))
    assert found == (3, {"sample_without_row": 1, "row_without_sample": 1})
    assert Dataset.open(tmp_path).shards[0].column("score").to_pylist() == [None, None, 2.0]


def test_rows_and_samples_without_each_other_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [*pairs("a", "b", "c"), ("bad.jpg", b"no image"), ("bad.txt", b"words")])
    statuses = ["success", "success", "success", "failed_to_download", None]
    sidecar(tmp_path / "0.parquet", ["a", "bad", "lost", "failed", None], status=statuses, score=[1.0] * 5)
    assert index(tmp_path) == (3, {"row_without_sample": 1, "sample_without_row": 1, "unreadable_header": 1})
    told = details(tmp_path)
    assert told["row_without_sample"].startswith(
        "2 of 5 rows of 0.parquet have no sample in the tar, the first is 'lost'"
    )
    assert told["sample_without_row"].startswith("2 of 3 samples have no row in 0.parquet, the first is 'b'")
    (shard,) = Dataset.open(tmp_path).shards
    assert shard.dropped_for_nulls(compile_filter("score < 0.5")) == 2
    assert shard.dropped_for_nulls(compile_filter("score > 0.5 or width > 1")) == 0


def test_a_shard_without_the_parquet_that_others_have_is_named(tmp_path: Path) -> None:
    write_pairs(tmp_path, 6, 2)
    (tmp_path / "00001.parquet").unlink()
    assert index(tmp_path) == (6, {})  # its .json members say the same
    write_tar(tmp_path / "00001.tar", pairs("a"))
    assert index(tmp_path) == (5, {"missing_sidecar": 1})
    (shard,) = [s for s in Dataset.open(tmp_path).shards if s.name == "00001.tar"]
    assert shard.dropped_for_nulls(compile_filter("punsafe < 0.5")) == 1


def test_null_sizes_do_not_hide_the_true_ones(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs("a", "b", "c"))
    sidecar(tmp_path / "0.parquet", ["a", "b", "c"], width=[None, 7, None], height=pa.array([1.5, None, None]))
    index(tmp_path)
    (shard,) = Dataset.open(tmp_path).shards
    assert shard.column("width").to_pylist() == [64, 7, 64]
    assert shard.column("height").to_pylist() == [1.5, 48.0, 48.0]


def test_sizes_of_another_type_are_columns_like_any_other(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs("a", "b"))
    sidecar(tmp_path / "0.parquet", ["a", "b"], width=["wide", None])
    index(tmp_path)
    assert Dataset.open(tmp_path).shards[0].column("width").to_pylist() == ["wide", None]


LONE = [("t.txt", b"a text"), *pairs("p"), ("u.txt", b"another")]


def test_texts_without_their_images_are_left_out_among_pairs(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", LONE)
    assert index(tmp_path) == (1, {"orphan_text": 2})
    strict = Dataset.open(tmp_path).fingerprint
    assert index(tmp_path, ALLOW) == (3, {})
    assert keys_of(tmp_path) == ["t", "p", "u"]
    assert Dataset.open(tmp_path).fingerprint != strict
    assert index(tmp_path) == (1, {"orphan_text": 2})
    assert Dataset.open(tmp_path).fingerprint == strict


@pytest.mark.parametrize("order", [("0", "1"), ("1", "0")])
def test_texts_in_shards_of_their_own_are_lone_where_another_shard_has_images(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    texts, images = (tmp_path / f"{name}.tar" for name in order)
    write_tar(texts, [("1.txt", b"words")])
    assert index(tmp_path) == (1, {})
    alone = Dataset.open(tmp_path).fingerprint
    write_tar(images, [("1.jpg", JPEG), *pairs("2")])
    assert index(tmp_path) == (1, {"missing_caption": 1, "orphan_text": 1})
    images.unlink()
    assert index(tmp_path) == (1, {})
    assert Dataset.open(tmp_path).fingerprint == alone


def test_documents_without_images_are_no_lone_texts(tmp_path: Path) -> None:
    document = {"texts": ["words"], "images": [None]}
    write_tar(tmp_path / "0.tar", [("d.json", json.dumps(document).encode()), *LONE])
    assert index(tmp_path) == (2, {"orphan_text": 2})
    assert keys_of(tmp_path) == ["d", "p"]


@pytest.mark.parametrize("rules", [IndexRules(), ALLOW])
def test_failed_downloads_are_no_texts(tmp_path: Path, rules: IndexRules) -> None:
    said = json.dumps({"status": "failed_to_download", "error_message": "404"}).encode()
    stored = [("b.txt", b"words"), ("c.txt", b"words"), ("c.json", b'{"status": "success"}')]
    write_tar(tmp_path / "0.tar", [("a.txt", b"words"), ("a.json", said), *stored])
    sidecar(tmp_path / "0.parquet", ["a", "b", "c"], status=["success", "failed_to_resize", "success"])
    assert index(tmp_path, rules) == (1, {"failed_download": 2})
    assert keys_of(tmp_path) == ["c"]
    assert {f.detail for f in lint(tmp_path).findings} == {
        "its status is failed_to_download: 404",
        "its status is failed_to_resize",
    }


def test_copies_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "d", 4, 2)
    (folder / "backup").mkdir()
    shutil.copy(folder / "00000.tar", folder / "backup" / "0 (1).tar")
    with pytest.raises(DatasetError, match=r"'00000.tar' = 'backup/0 \(1\).tar'.*--allow-duplicates"):
        build_index(folder, workers=1)
    with pytest.raises(DatasetError, match=r"2 shards at .* are copies of 1"):
        Dataset.open(folder)
    assert index(folder, IndexRules(allow_duplicates=True)) == (6, {"duplicate_shard": 1})
    assert Dataset.open(folder).fingerprint
    (folder / ALLOWED_NAME).unlink()
    with pytest.raises(DatasetError, match="are copies"):
        Dataset.open(folder)


def test_empty_shards_are_no_copies(tmp_path: Path) -> None:
    write_texts(tmp_path, 2, 2)
    for name in ("a", "b"):
        (tmp_path / f"{name}.tar").write_bytes(bytes(10_240))
    assert index(tmp_path) == (2, {})


def test_snapshots_of_the_hubs_cache_get_advice_that_works(tmp_path: Path) -> None:
    repo = tmp_path / "datasets--a--b"
    write_texts(repo / "blobs", 2, 2)
    (repo / "blobs" / "00000.tar").rename(repo / "blobs" / "c0ffee")
    for revision in ("main1", "main2"):
        (repo / "snapshots" / revision).mkdir(parents=True)
        (repo / "snapshots" / revision / "0.tar").symlink_to("../../blobs/c0ffee")
    with pytest.raises(DatasetError, match=r"cp -rL \S+/snapshots/main1 FOLDER"):
        build_index(repo, workers=1)
    shutil.copytree(repo / "snapshots" / "main1", tmp_path / "copy")
    assert index(tmp_path / "copy") == (2, {})


def test_an_index_of_other_rules_is_refused_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_texts(tmp_path, 3, 3)
    monkeypatch.setattr(rules_module, "RULES_VERSION", 7)
    build_index(folder, workers=1)
    before = Dataset.open(folder).fingerprint
    monkeypatch.undo()
    with pytest.raises(StaleIndexError, match=r"rules '7' for samples, this program has rules \d.* index again"):
        Dataset.open(folder)
    assert build_index(folder, workers=1).num_built == 1
    assert Dataset.open(folder).fingerprint != before


def test_shards_of_different_rules_are_no_dataset(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "d", 4, 2)
    build_index(folder, workers=1)
    other = tmp_path / "one"
    shutil.copytree(folder, other)
    build_index(other, workers=1, rules=ALLOW)
    for suffix in ("index", "known", "numeric"):
        shutil.copy(other / f"00001.tar.{suffix}", folder / f"00001.tar.{suffix}")
    with pytest.raises(StaleIndexError, match="indexed by different rules"):
        Dataset.open(folder)
    assert build_index(folder, workers=1).num_built == 1
    assert Dataset.open(folder)


def test_files_that_look_like_shards_are_named_with_what_helps(tmp_path: Path) -> None:
    write_texts(tmp_path, 2, 2)
    names = ["1.tar.gz", "2.tgz", "3.tar.zst", "4.TAR", "sub/5.jsonl", "6.parquet", "7.tar.xz"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "00000_stats.json").write_text("{}")
    assert index(tmp_path) == (2, {"unread_file": len(names)})
    told = {finding.shard: finding.detail for finding in lint(tmp_path).findings}
    assert sorted(told) == sorted(names)
    helps = {"1.tar.gz": "gunzip", "3.tar.zst": "zstd -d", "4.TAR": "mv"}
    assert all(command in told[name] for name, command in helps.items())


def test_a_folder_of_compressed_tars_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "1.tar.gz").write_bytes(b"x")
    with pytest.raises(DatasetError, match=r"no .tar, .parquet or .jsonl shards .*'1.tar.gz'.*gunzip"):
        build_index(tmp_path)


def test_a_quarantine_list_drops_what_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    members = [
        *pairs("a"),
        ("a.jpg", JPEG),
        *pairs("b"),
        ("b.png", JPEG),
        *pairs("a"),
        ("bad.jpg", b""),
        ("bad.txt", b"t"),
    ]
    write_tar(tmp_path / "0.tar", members)
    assert index(tmp_path)[0] == 2
    report = lint(tmp_path)
    assert {"duplicate_member", "extra_image", "duplicate_key"} <= report.counts.keys()
    assert report.quarantine.keys == {"0.tar": frozenset({"bad"})}
    undecodable = lint(tmp_path, judge=lambda *_: ImageFault("broken", is_served=False))
    assert undecodable.quarantine.keys == {"0.tar": frozenset({"a", "b", "bad"})}


def test_names_with_unusual_characters_are_names(tmp_path: Path) -> None:
    names = ["shot\u3000a", "shot\u00a0b", "shot\u202fc", "so\u00adft", "joi\u200dner"]
    write_tar(tmp_path / "0.tar", [*pairs(*names), ("bell\a.txt", b"t"), ("line\u2028.txt", b"t")])
    assert index(tmp_path) == (5, {"unsafe_name": 2})
    assert keys_of(tmp_path) == names
    told = [finding.detail for finding in lint(tmp_path).findings]
    assert all("has control characters or line breaks" in detail and detail.isprintable() for detail in told)


def test_findings_name_keys_as_they_are(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("shot\u3000a.jpg", b"no image"), ("shot\u3000a.txt", b"t"), *pairs("b")])
    build_index(tmp_path, workers=1)
    assert lint(tmp_path).quarantine.keys == {"0.tar": frozenset({"shot\u3000a"})}


def test_columns_of_databases_are_kept_or_named(tmp_path: Path) -> None:
    from datetime import date
    from decimal import Decimal

    write_tar(tmp_path / "0.tar", pairs("a"))
    sidecar(
        tmp_path / "0.parquet",
        ["a"],
        score=[Decimal("0.125")],
        day=[date(2024, 5, 6)],
        when=pa.array([0], pa.timestamp("us")),
        tags=[["x"]],
    )
    assert index(tmp_path) == (1, {"unusable_column": 1})
    assert "tags: a column of type list" in details(tmp_path)["unusable_column"]
    (shard,) = Dataset.open(tmp_path).shards
    for text in ("score == 0.125", 'day < "2025"', 'when >= "1970"'):
        assert shard.keep(compile_filter(text)).tolist() == [True], text


def test_every_rule_changes_the_fingerprint(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", pairs("a"))
    found = Counter[str]()
    for text_only in TextOnly:
        for keys in MetadataKeys:
            build_index(tmp_path, workers=1, rules=IndexRules(text_only, keys))
            found[Dataset.open(tmp_path).fingerprint] += 1
    assert set(found.values()) == {1}


@pytest.mark.parametrize(
    ("of_text", "of_image"), [("caf\u00e9", "cafe\u0301"), ("Shot", "shot"), ("\u00c9T\u00c9", "e\u0301te\u0301")]
)
@pytest.mark.parametrize("image_first", [True, False])
def test_spellings_that_differ_are_both_named(tmp_path: Path, of_text: str, of_image: str, image_first: bool) -> None:
    """A pair whose halves are called alike to people, and not to programs."""
    members = [(f"{of_image}.jpg", JPEG), (f"{of_text}.txt", b"words")]
    write_tar(tmp_path / "0.tar", [*pairs("a"), *(members if image_first else members[::-1]), *pairs("z")])
    assert index(tmp_path) == (2, {"missing_caption": 1, "orphan_text": 1})
    found = details(tmp_path)
    assert found["orphan_text"].startswith(f"a text called {of_text!a}, whose image is called {of_image!a}: the two")


@pytest.mark.parametrize(
    ("of_text", "of_image", "said"),
    [
        ("shot", "shot", "in images.tar; put both into one tar under one name, or the tars into two folders"),
        ("caf\u00e9", "cafe\u0301", "in images.tar, in another case or form of Unicode (NFC, NFD); put both"),
        ("Shot", "shot", "in images.tar, in another case or form of Unicode (NFC, NFD); put both into one tar"),
        ("shot", "other", "is the image called otherwise, or in another tar?"),
    ],
)
def test_halves_of_a_pair_in_two_tars_are_named(tmp_path: Path, of_text: str, of_image: str, said: str) -> None:
    write_tar(tmp_path / "texts.tar", [(f"{of_text}.txt", b"words"), ("blank.txt", b" ")])
    write_tar(tmp_path / "images.tar", [(f"{of_image}.jpg", JPEG), *pairs("pair")])
    assert index(tmp_path) == (1, {"missing_caption": 2, "orphan_text": 1})
    found = {(f.shard, f.kind): f.detail for f in lint(tmp_path).findings}
    assert said in found["texts.tar", "orphan_text"]
    assert found["texts.tar", "missing_caption"] == "the text in .txt is blank"
